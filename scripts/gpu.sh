# `./dev gpu`; sourced by dev.
# The CUDA path, built and tested over the CUDA PyTorch of python3, on a machine that need not have a network: what
# apt brings elsewhere lies in $gpu_pack, which `./dev gpu --pack` fills. None of our sources is CUDA's C++, but the
# CMake package of such a PyTorch asks for CUDA's compiler.

gpu_pack=build/gpu-pack
gpu_seconds=600  # for everything

pack_for_gpu() {
  on_apt || die "gpu: --pack takes packages from apt, which is not here"
  local packages=("${gpu_packages[@]}")
  # The library of fmt, whose package's name has its version.
  mapfile -t -O ${#packages[@]} packages < <(apt-cache depends libfmt-dev | sed -n 's/.* Depends: \(libfmt[0-9]*\)$/\1/p')
  rm -rf "$gpu_pack" && mkdir -p "$gpu_pack/wheels"
  say "$gpu_pack: ${packages[*]}, ${python_build[*]}, pytest"
  download() { (cd "$gpu_pack" && apt-get -q download "${packages[@]}"); }
  logged build/apt.log apt_get update
  logged build/apt.log download
  for deb in "$gpu_pack"/*.deb; do dpkg -x "$deb" "$gpu_pack"; done
  rm -rf "$gpu_pack"/*.deb "$gpu_pack/usr/share/doc"
  find "$gpu_pack" -xtype l -delete
  logged build/pip.log python3 -m pip download --only-binary=:all: --dest "$gpu_pack/wheels" "${python_build[@]}" pytest
  du -sh "$gpu_pack"
}

# Prints the version of python3's torch, its CUDA, and the name of the GPU or "no GPU".
probe_torch='
import torch
if torch.version.cuda is None:
    raise SystemExit(f"the PyTorch {torch.__version__} of python3 is not built with CUDA")
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
print(torch.__version__, torch.version.cuda, gpu, sep="|")'

# build/gpu/venv: python3's own packages, and lockstep.
install_for_gpu() {
  local venv=build/gpu/venv
  venv_over python3 "$venv"
  "$venv/bin/python" -c 'import nanobind, scikit_build_core, pytest' 2>/dev/null ||
    "$venv/bin/python" -m pip install --no-index --find-links "$gpu_pack/wheels" "${python_build[@]}" pytest
  local install=("$venv/bin/python" -m pip install --no-build-isolation --no-deps --no-index --force-reinstall)
  "${install[@]}" -Cbuild-dir="$PWD/build/gpu/python" -Ccmake.define.LOCKSTEP_BUILT="$PWD/build/gpu" . &&
    "${install[@]}" -Cbuild-dir="$PWD/build/gpu/python-torch" ./python/torch
}

# Runs a command of the tests.
on_gpu() { # NAME COMMAND...
  local start=$SECONDS
  timeout --kill-after=10 $((gpu_seconds - SECONDS)) "${@:2}" </dev/null || die "gpu: $1 ended with exit code $?"
  echo "  $1: $((SECONDS - start)) s"
}

test_on_gpu() {
  local found torch cuda gpu nccl start tests=build/gpu/tests/nn/nn_tests
  found=$(python3 -W ignore -c "$probe_torch") || die "gpu: python3 needs a PyTorch with CUDA"
  IFS='|' read -r torch cuda gpu <<<"$found"
  say "PyTorch $torch, CUDA $cuda, $gpu"
  torch_dir=$(python3 -W ignore -c 'import torch; print(torch.utils.cmake_prefix_path)')
  if [ -d "$gpu_pack" ]; then
    export CMAKE_PREFIX_PATH=$PWD/$gpu_pack/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
    LD_LIBRARY_PATH=$(dirname "$(find "$PWD/$gpu_pack" -name 'libfmt.so' | head -n 1)"):${LD_LIBRARY_PATH:-}
    export LD_LIBRARY_PATH
    export CPLUS_INCLUDE_PATH=$PWD/$gpu_pack/usr/include  # Gloo's headers have no CMake package
  fi
  # NCCL's headers, of pip's PyTorch.
  nccl=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/nccl/include
  [ ! -d "$nccl" ] || export CPLUS_INCLUDE_PATH=${CPLUS_INCLUDE_PATH:+$CPLUS_INCLUDE_PATH:}$nccl
  offline=yes
  [ -n "${CUDACXX:-}" ] || [ ! -x /usr/local/cuda/bin/nvcc ] || export CUDACXX=/usr/local/cuda/bin/nvcc
  # Any: nothing here is compiled for a GPU, but PyTorch's package would look for one by a program.
  export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
  build gpu lockstep_cli nn_tests
  start=$SECONDS
  say "building the Python package"
  logged build/gpu/python.log install_for_gpu || die "gpu: the Python package does not build"
  echo "  built in $((SECONDS - start)) s"

  say "tests"
  on_gpu nn_tests "$tests" --gtest_brief=1 --gtest_filter='Cuda*:CpuRanks*'
  on_gpu python build/gpu/venv/bin/python -m pytest -q -p no:cacheprovider --tb=short -rs tests/python/test_cuda.py
  if [ "$gpu" = "no GPU" ]; then
    echo "gpu: no GPU here: everything compiles, but nothing was run on CUDA"
    return
  fi
  if command -v compute-sanitizer >/dev/null; then
    local tool
    for tool in memcheck racecheck; do
      on_gpu "$tool" compute-sanitizer --tool "$tool" --error-exitcode 99 "$tests" --gtest_brief=1 \
        --gtest_filter='CudaTest.*'
    done
  fi
  say "benchmark"
  on_gpu benchmark build/gpu/venv/bin/python bench/gpu.py
}

# The compiler of CUDA for the PyTorch of an environment, from pip: CMake's package of such a PyTorch asks for it.
need_cuda() { # VENV
  local version cuda library
  version=$("$1/bin/python" -W ignore -c 'import torch; print(torch.version.cuda or "")')
  [ -n "$version" ] || return 0
  if [ ! -e "$1/cuda-$version" ]; then
    logged build/pip.log "$1/bin/pip" install nvidia-{cuda-nvcc,cuda-crt,nvvm}"==$version.*" ||
      die "pip cannot install the compiler of CUDA $version"
    touch "$1/cuda-$version"
  fi
  cuda=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu${version%%.*}
  # The compiler's linker and CMake want the names that pip's packages leave out.
  [ -e "$cuda/lib64" ] || ln -s lib "$cuda/lib64"
  for library in "$cuda"/lib/lib*.so.*; do
    [ -e "${library%%.so.*}.so" ] || ln -s "${library##*/}" "${library%%.so.*}.so"
  done
  export CUDACXX=$cuda/bin/nvcc CUDA_PATH=$cuda TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
}

# Over a CUDA PyTorch from pip, in build/venv-cuda, 5 GB, without a GPU.
compile_for_gpu() {
  need "${build_packages[@]}" "$gloo_package"
  need_venv build/venv-cuda "${venv_torch_newer[-1]}" "${python_build[@]}" pytest
  need_cuda build/venv-cuda
  export PATH=$PWD/build/venv-cuda/bin:$PATH
  gpu_seconds=3600
  test_on_gpu
}

command_gpu() {
  case ${1:-} in
    --pack) pack_for_gpu ;;
    --compile) compile_for_gpu ;;
    '') test_on_gpu ;;
    *) die "gpu: unknown argument $1 (see ./dev help)" ;;
  esac
}
