#!/usr/bin/env bash
# Make an environment with vLLM on the CPU, Forebay and LMCache, for `bench/vllm_restore.py --lmcache-python`:
#
#     bench/peers/install_lmcache.sh [DIRECTORY]        default: .venv-lmcache in the repository
#
# LMCache asks for libraries of accelerators and for older versions of what vLLM has; both are left out.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
target=${1:-$repository/.venv-lmcache}
lmcache="lmcache==0.5.6"

"$repository/tests/engines/install.sh" "$target"
bin=$target/bin
"$bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$lmcache" \
    aiofile aiofiles caio nvtx redis awscrt opentelemetry-exporter-prometheus setuptools_scm
"$bin/python" -c "import lmcache.v1.multiprocess.server, lmcache.integration.vllm.lmcache_mp_connector"
echo "$bin/python has LMCache"
