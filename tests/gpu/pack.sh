#!/usr/bin/env bash
# Packs all that run.sh needs into one folder, for a machine with a GPU, without network and without
# a compiler.
#   tests/gpu/pack.sh FOLDER [PYTHON...]
# PYTHON: interpreters of the versions that may be there; python3 unless named. For others run.sh
# builds the package from the source, which needs a compiler, and finds numpy there or nowhere.
set -euo pipefail

if (($# == 0)); then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
pythons=("${@:2}")
((${#pythons[@]})) || pythons=(python3)
most_bytes=$((60 << 20))
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [[ -n $(ls -A "$out") && ! -e $out/run.sh ]]; then
  echo "$out is neither empty nor an earlier pack" >&2
  exit 2
fi
rm -rf "${out:?}"/{src,wheels,bin,run.sh}
mkdir -p "$out"/{src,wheels,bin}

echo "the source"
cd "$root"
git ls-files -z --cached --others --exclude-standard |
  while IFS= read -r -d '' file; do [[ ! -f $file ]] || printf '%s\0' "$file"; done |
  tar --create --null --files-from=- | tar --extract --directory="$out/src"
cp tests/gpu/run.sh "$out/run.sh"

echo "the contract suite and the loop of the benchmarks, built"
build=build/gpu-pack
cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVMEM_CHECKED=ON -DKVMEM_BUILD_TESTS=ON \
  -DCMAKE_EXE_LINKER_FLAGS='-static-libstdc++ -static-libgcc' >/dev/null
cmake --build $build --target kvmem-test-contract >/dev/null
strip -o "$out/bin/kvmem-test-contract" $build/kvmem-test-contract
"${CC:-cc}" -O2 -shared -fPIC bench/gpu/raw_copies.c -o "$out/bin/raw_copies.so"

for python in "${pythons[@]}"; do
  echo "the package and what its tests need, for $("$python" --version)"
  "$python" -m pip wheel -q --no-deps --wheel-dir "$out/wheels" .
  "$python" -m pip download -q --only-binary=:all: --dest "$out/wheels" \
    numpy pytest pytest-benchmark rich typer scikit-build-core 'pybind11>=3,<4'
done
echo "NVIDIA's runtime, of two major versions"
"${pythons[0]}" -m pip download -q --only-binary=:all: --no-deps --dest "$out/wheels" \
  'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-runtime-cu12==12.8.*'

bytes=$(du --bytes --summarize "$out" | cut -f1)
echo "$out: $((bytes >> 20)) MiB"
if ((bytes >= most_bytes)); then
  echo "that is more than $((most_bytes >> 20)) MiB" >&2
  exit 1
fi
