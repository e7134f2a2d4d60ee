#!/usr/bin/env bash
# Makes a virtual environment for tests that need a framework, on top of the one that has the tools.
#
#     scripts/test-env.sh VENV REQUIREMENTS BASE
#
# VENV gets exactly the pinned lines of REQUIREMENTS, from PyPI, without what they depend on: torch would bring 3 GB of
# CUDA libraries, which stand-ins replace. What VENV hasn't, such as pytest, numpy and the pdkv of this tree, comes from
# the environment BASE. A complete VENV of the same requirements, stand-ins and Python is left as it is. Needs a C
# compiler and readelf where torch is among the requirements.
set -euo pipefail
venv=$1 requirements=$2 base=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
stamp=$venv/.made-of
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

site_packages() {
    "$1/bin/python" -Ic 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
}

# First on the path is what VENV has itself. `.pth` files of the base, such as pdkv's, are honoured. Written anew each
# time, as a file of its own: VENV may be a copy, by hard links even, of that of another checkout.
put_on_top_of_base() {
    local file
    file=$(site_packages "$venv")/on-top-of.pth
    rm -f "$file"
    echo "import site; site.addsitedir('$(site_packages "$base")')" >"$file"
}

# What VENV is made of; when that changes it is made anew.
made_of=$(cat "$requirements" "$here/cuda_standins.py" && "$base/bin/python" -VV)

if [ "$made_of" = "$(cat "$stamp" 2>/dev/null)" ]; then
    put_on_top_of_base
    exit 0
fi

for tool in cc readelf; do
    command -v "$tool" >/dev/null || { echo "stand-ins for CUDA need \`$tool\` to build" >&2; exit 1; }
done
echo "creating $venv with torch, which fetches and unpacks some hundred MB"
start=$SECONDS
rm -rf "$venv"
"$base/bin/python" -m venv --without-pip "$venv"
"$base/bin/pip" --python "$venv/bin/python" install --quiet --no-deps --no-compile \
    --only-binary :all: --requirement "$requirements"
if [ -d "$(site_packages "$venv")/torch/lib" ]; then
    "$venv/bin/python" "$here/cuda_standins.py" "$(site_packages "$venv")"
fi
put_on_top_of_base
echo "$made_of" >"$stamp"
echo "$venv: $((SECONDS - start)) s, $(du -sm "$venv" | cut -f1) MB"
