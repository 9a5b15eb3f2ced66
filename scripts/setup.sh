#!/usr/bin/env bash
# Sets up everything that building, testing and running graft's demo needs. Safe to run again: a step
# whose result is there already is skipped.
#
#   scripts/setup.sh [--no-data]
#
#   --no-data   only what building and testing need; not the demo's teacher and text
#
# Debian packages are installed as root or through sudo; all else goes into this folder (.deps/, data/)
# and into the download cache. Settings, all optional:
#   GRAFT_CACHE         where downloads are kept (default ~/.cache/graft)
#   GRAFT_LIBTORCH      a LibTorch of your own, or a folder in CMAKE_PREFIX_PATH: none is fetched then
#   CUDA_HOME           the CUDA Toolkit to take libcudart and libcupti from (default /usr/local/cuda)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps=$root/.deps
venv=$deps/venv
log=$deps/setup.log
export GRAFT_CACHE=${GRAFT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/graft}

build_packages=(
  abigail-tools ca-certificates ccache cmake g++ git ninja-build python3 python3-venv
  libboost-dev libboost-filesystem-dev libcli11-dev libicu-dev libpcre2-dev libspdlog-dev libssl-dev
  libtomlplusplus-dev nlohmann-json3-dev libbenchmark-dev libgmock-dev libgtest-dev
)
text_package=r-cran-janeaustenr

say() { printf 'setup: %s\n' "$*"; }

# die WHAT WAY_OUT
die() {
  printf 'setup: %s\n       %s\n' "$1" "$2" >&2
  exit 1
}

# logged WHAT WAY_OUT COMMAND...: runs quietly; when it fails, shows the end of what it said.
logged() {
  local what=$1 way_out=$2
  shift 2
  printf '\n$ %s\n' "$*" >>"$log"
  if ! "$@" >>"$log" 2>&1; then
    tail -n 15 "$log" >&2
    die "$what failed (all of it in $log)" "$way_out"
  fi
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

apt_get() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 "$@"
}

update_package_lists() {
  [ -z "${lists_updated:-}" ] || return 0
  logged "'apt-get update'" "check the network and /etc/apt/sources.list, then run this again" \
    apt_get update
  lists_updated=1
}

install_packages() {
  local package missing=()
  for package in "${build_packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
      missing+=("$package")
  done
  if [ ${#missing[@]} = 0 ]; then
    say "Debian packages: all there"
    return
  fi
  if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
    die "Debian packages are missing and there is no sudo: ${missing[*]}" \
      "run 'apt-get install ${missing[*]}' as root, then this again"
  fi
  say "Debian packages: installing ${missing[*]}"
  update_package_lists
  logged "'apt-get install'" "mend what it says above, then run this again" \
    apt_get install --no-install-recommends "${missing[@]}"
}

# Prints the first Python that can make the environment. Debian's own comes first: a shim of a version
# manager may be another Python tomorrow.
find_python() {
  local python
  for python in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do
    if "$python" -c 'import ensurepip, sys, venv
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  die "no Python 3.11 to 3.14 that can make a virtual environment" \
    "install python3 and python3-venv (Debian 12 or newer has them), then run this again"
}

make_environment() {
  local stamp python
  stamp=$(sha256sum "$root/scripts/requirements.txt")
  if [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    say "Python environment: .deps/venv, there already"
    return
  fi
  python=$(find_python)
  say "Python environment: making .deps/venv with $python"
  rm -rf "$venv"
  logged "making .deps/venv" "remove $venv and run this again" "$python" -m venv "$venv"
  logged "installing scripts/requirements.txt" "check the network, then run this again" \
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --no-deps \
    --require-hashes --only-binary :all: -r "$root/scripts/requirements.txt"
  printf '%s\n' "$stamp" >"$venv/.stamp"
}

# Asks the build's own find module: prints the folder of the LibTorch it would take (or an empty line)
# and, when that one cannot be used, the reason.
locate_libtorch() {
  cat >"$deps/locate_libtorch.cmake" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
find_package(LibTorch QUIET)
message("${LibTorch_ROOT_DIR}")
if(NOT LibTorch_FOUND)
  message("${LibTorch_REASON}")
endif()
CMAKE
  cmake "-DCMAKE_MODULE_PATH=$root/cmake" -P "$deps/locate_libtorch.cmake" 2>&1
}

# Prints the path of LIBRARY in the CUDA Toolkit, if it is there.
toolkit_library() {
  local home folder
  for home in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda /usr/local/cuda-*; do
    for folder in lib64 lib extras/CUPTI/lib64 targets/x86_64-linux/lib; do
      if [ -n "$home" ] && [ -e "$home/$folder/$1" ]; then
        printf '%s\n' "$home/$folder/$1"
        return
      fi
    done
  done
}

# fetch_wheels REQUIREMENTS: prints the wheels' paths.
fetch_wheels() {
  "$venv/bin/python" "$root/scripts/wheels.py" fetch "$root/scripts/$1" ||
    die "fetching what scripts/$1 pins failed" "see above, then run this again"
}

unpack_wheel() {
  logged "unpacking $1" "free some disk space, or remove the file if it is damaged; then run this again" \
    "$venv/bin/python" "$root/scripts/wheels.py" unpack "$@"
}

# add_cuda_runtime LIB_DIR: the two CUDA libraries that libtorch_cpu.so is linked with, GPU or not.
add_cuda_runtime() {
  local lib_dir=$1 cudart cupti wheels
  cudart=$(toolkit_library libcudart.so.13)
  cupti=$(toolkit_library libcupti.so.13)
  if [ -n "$cudart" ] && [ -n "$cupti" ]; then
    say "LibTorch: libcudart and libcupti from $(dirname "$cudart")"
    cp -L "$cudart" "$cupti" "$lib_dir"
    return
  fi
  say "LibTorch: fetching libcudart and libcupti (13 MB)"
  mapfile -t wheels < <(fetch_wheels requirements-cuda-runtime.txt)
  [ ${#wheels[@]} = 2 ] || exit 1
  unpack_wheel "${wheels[0]}" "$lib_dir" 'nvidia/cu13/lib/libcudart.so.13'
  unpack_wheel "${wheels[1]}" "$lib_dir" 'nvidia/cu13/lib/libcupti.so.13'
}

unpack_libtorch() {
  local partial=$deps/libtorch.partial wheel missing
  wheel=$(fetch_wheels requirements-torch.txt)
  rm -rf "$partial"
  unpack_wheel "$wheel" "$partial" 'torch/include/*=include' 'torch/lib/libc10.so=lib' \
    'torch/lib/libtorch_cpu.so=lib' 'torch/lib/libgomp*.so*=lib'
  add_cuda_runtime "$partial/lib"
  missing=$(ldd "$partial/lib/libtorch_cpu.so" | sed -n 's/^\s*\(\S*\) => not found.*/\1/p')
  [ -z "$missing" ] || die "libtorch_cpu.so still misses: ${missing//$'\n'/ }" \
    "install what provides it, or name another LibTorch with GRAFT_LIBTORCH"
  printf '%s\n' "$1" >"$partial/.stamp"
  rm -rf "$deps/libtorch"
  mv "$partial" "$deps/libtorch"
}

get_libtorch() {
  local found reason stamp named=${GRAFT_LIBTORCH:-${LibTorch_ROOT:-}}
  {
    read -r found || true
    read -r reason || true
  } < <(locate_libtorch)
  if [ -n "$named" ] || { [ -n "$found" ] && [ "$found" != "$(realpath -m "$deps/libtorch")" ]; }; then
    [ -z "$reason" ] || die "$reason" "(unset the variable to have LibTorch fetched)"
    say "LibTorch: yours in $found"
    return
  fi
  stamp=$(cd "$root/scripts" && sha256sum requirements-torch.txt requirements-cuda-runtime.txt)
  if [ -n "$found" ] && [ "$(cat "$deps/libtorch/.stamp" 2>/dev/null)" = "$stamp" ]; then
    say "LibTorch: .deps/libtorch, there already"
    return
  fi
  [ "$(uname -sm)" = "Linux x86_64" ] || die "there is no pinned LibTorch for $(uname -sm)" \
    "name your own, 2.8 or newer, with GRAFT_LIBTORCH=/path/to/libtorch"
  say "LibTorch: unpacking the torch wheel into .deps/libtorch (530 MB to fetch, if not in $GRAFT_CACHE)"
  unpack_libtorch "$stamp"
}

get_data() {
  "$venv/bin/python" "$root/scripts/get_teacher.py" "$root/data/teacher/SmolLM2-135M-Instruct" |
    sed 's/^/setup: /' || die "the demo's teacher is not there" "see above, then run this again"
  # Fresh images come without package lists, and apt-get download needs them.
  if command -v apt-cache >/dev/null && ! apt-cache show "$text_package" >/dev/null 2>&1; then
    update_package_lists
  fi
  "$venv/bin/python" "$root/scripts/get_text.py" "$root/data/text" |
    sed 's/^/setup: /' || die "the demo's text is not there" "see above, then run this again"
}

main() {
  local with_data=1
  while [ $# -gt 0 ]; do
    case $1 in
      --no-data) with_data= ;;
      -h | --help)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        return
        ;;
      *) die "unknown option '$1'" "the only ones are --no-data and --help" ;;
    esac
    shift
  done
  command -v apt-get >/dev/null || die "this needs Debian 12 or newer, or a system with apt-get" \
    "elsewhere install the counterparts of: ${build_packages[*]}"
  mkdir -p "$deps" "$GRAFT_CACHE"
  : >"$log"
  install_packages
  make_environment
  # Side by side: both fetch and unpack.
  local data=
  if [ -n "$with_data" ]; then
    get_data &
    data=$!
    trap wait EXIT
  fi
  get_libtorch
  [ -z "$data" ] || wait "$data" || exit 1
  say "done"
}

main "$@"
