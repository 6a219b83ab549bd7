#!/usr/bin/env bash
# Downloads wheels for a machine that has JAX, Flax, Optax, Orbax and TensorStore for Python 3.12, and no package registry:
#   benchmarks/accelerator_wheels.sh [FOLDER [PACKAGE...]]
# The folder is .whl by default, which git ignores. Without packages: those of this project that such images lack. Versions are
# those of constraints.txt. See benchmarks/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-.whl}
shift || true
[ "$#" -gt 0 ] || set -- msgspec xxhash
platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${platform}_x86_64")
done
rm -rf "$folder"
"${PYTHON:-python3}" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp "${platforms[@]}" --constraint constraints.txt --dest "$folder" "$@"
ls "$folder"
