#!/usr/bin/env bash
# [RELEASE=jammy|noble|trixie] scripts/clean_root.sh DEBS [WAY ...]: from nothing to hello with 2 ranks, in a bare root of
# this system's release, of that Ubuntu or of that Debian. A way is deb (the packages in the folder DEBS, of this system),
# hosts (those of them that two hosts need, network namespaces), cmake, pip (of the sources), wheels (those of `./dev wheel`
# in build/dist, here with PyTorch to a training), demo (README's first command), or wheel-from-source (of jammy alone:
# build/wheel/unrepaired gets lockstep-dist of its Python and of 3.12).
# Prints each command with its seconds, downloads included, and those of the processor. Needs root and debootstrap;
# `./dev package --test` runs it.
#
# debootstrap makes the root, and each way gets a copy. Mounts and processes are in namespaces that end with this
# script, also by SIGKILL; then only the folder is left, which the next run removes.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$PWD/build/clean_root

remove() { # until the last process in it has ended
  for _ in {1..50}; do
    if rm -rf --one-file-system "$out" 2>/dev/null; then return; fi
    sleep 0.1
  done
}
if [ "${1:-}" != --inside ]; then
  debs=$(realpath "${1:?the folder of the packages}") || exit
  [ $# -gt 1 ] || if [ -n "${RELEASE:-}" ]; then set -- "$1" cmake pip wheels; else set -- "$1" deb hosts cmake pip wheels demo; fi
  setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --mount-proc \
    "scripts/${0##*/}" --inside "$debs" "${@:2}" &
  inside=$!
  trap 'kill -KILL $inside 2>/dev/null; wait $inside; remove' EXIT
  trap 'exit 130' INT TERM HUP
  wait $inside
  exit
fi
debs=$2 ways=("${@:3}") failed=0

die() { echo "clean_root: $*" >&2 && exit 1; }

measure() { # LOG COMMAND...; sets the seconds that it took, and those of the processor
  local used user system rc=0 TIMEFORMAT='%0R %0U %0S'
  used=$({ time timeout 1800 "${@:2}" >"$1" 2>&1 </dev/null; } 2>&1) || rc=$?
  read -r seconds user system <<<"$used"
  cpu=$((user + system))
  return $rc
}

# --- the bare root -------------------------------------------------------------------------------

remove && mkdir -p "$out"
# Release and mirror are those of this machine and its apt, if it is no other; so are the proxies, and the package index
# of pip and its folder of wheels, which may have a torch without CUDA.
ubuntu=http://archive.ubuntu.com/ubuntu keyring=() rules=()
own=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
codename=${RELEASE:-$own}
if [[ ${RELEASE:-} =~ ^(jammy|noble)$ ]]; then
  sources=$(printf "deb $ubuntu %s\n" "$codename"{,-updates,-security}{' main',' universe'})
  keys=ubuntu-keyring_2023.11.28.1_all.deb  # Debian has no package of them
  curl -fsS -o "$out/$keys" "$ubuntu/pool/main/u/ubuntu-keyring/$keys" &&
    sha256sum --quiet -c <<<"36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8  $out/$keys" &&
    dpkg-deb -x "$out/$keys" "$out/keys" || die "no keys of Ubuntu's archive"
  keyring=("--keyring=$out/keys/usr/share/keyrings/ubuntu-archive-keyring.gpg")
  rules=(/usr/share/debootstrap/scripts/gutsy)  # of all Ubuntus, also of those that are newer than debootstrap
else
  sources=$(apt-get indextargets --format '$(SITE) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    awk -v name="$own" '$2 ~ "^" name "(-updates|-security)?$" { print "deb", $0 }' | sort -u)
  sources=${sources//$own/$codename}
fi
mirror=$(awk -v name="$codename" '$3 == name { print $2; exit }' <<<"$sources")
[ -n "$mirror" ] || die "apt of this machine has no mirror of '$codename'"
components=$(awk -v name="$codename" '$3 == name { print $4 }' <<<"$sources" | paste -sd,)
certificates=/etc/ssl/certs/ca-certificates.crt  # with an authority of this machine's own, if it has one
index=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null)}
found=${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null)}
[ -d "$found" ] || found=''

measure "$out/bare.log" debootstrap "${keyring[@]}" --variant=minbase --components="$components" "$codename" "$out/bare" "$mirror" "${rules[@]}" ||
  { tail -n 20 "$out/bare.log" && die "debootstrap failed"; }
echo "$sources" >"$out/bare/etc/apt/sources.list"
apt-config dump | grep -E '^Acquire::(https?::Proxy|Check-)' >"$out/bare/etc/apt/apt.conf.d/99machine"
cp -L /etc/resolv.conf /etc/hosts "$out/bare/etc/"
cp -L $certificates "$out/bare/etc/machine.crt"
mkdir "$out/bare/lockstep"
git ls-files -z | tar --null --files-from=- -c | tar -x -C "$out/bare/lockstep"
printf '%6d s, %4d s of CPU  debootstrap of %s, %s\n' "$seconds" "$cpu" "$codename" \
  "$(du -sh "$out/bare" --exclude=lockstep | cut -f1)"

# --- the ways ------------------------------------------------------------------------------------

begin() { # WAY: a copy of the bare root, with 64 MiB of shared memory, as containers have
  way=$1 root=$out/$1 log=$out/$1.log total=0 total_cpu=0
  cp -a "$out/bare" "$root"
  mount -t proc proc "$root/proc"
  mount -t tmpfs -o size=64m tmpfs "$root/dev/shm"
  if [ -n "$found" ]; then
    mkdir "$root/found" && mount --bind -o ro "$found" "$root/found"
  fi
  printf '\n%s\n' "$way"
}

fail() { # COMMAND
  failed=$((failed + 1))
  printf 'FAILED: %s: %s\n' "$way" "$1"
  tail -n 30 "$log"
}

run() { # COMMAND, in the root, in the sources
  measure "$log" chroot "$root" env -i HOME=/root LANG=C.UTF-8 PATH=/venv/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    DEBIAN_FRONTEND=noninteractive PIP_CERT=/etc/machine.crt ${found:+PIP_FIND_LINKS=/found} ${index:+PIP_INDEX_URL="$index"} \
    bash -c "cd /lockstep && $1" || { fail "$1"; return 1; }
  total=$((total + seconds)) total_cpu=$((total_cpu + cpu))
  printf '%6d s, %4d s of CPU  %s\n' "$seconds" "$cpu" "$1"
}

hello() { # COMMAND
  run "$1" || return
  grep -qx 'rank 1 of 2: the sum is 3' "$log" || { fail "$1"; return 1; }
  printf '%6d s, %4d s of CPU  in all\n' "$total" "$total_cpu"
}

apt='apt-get update && apt-get install -y --no-install-recommends'
libraries='libfmt-dev libcli11-dev nlohmann-json3-dev libcereal-dev libsodium-dev'

way_deb() {
  begin deb
  mkdir "$root/packages" && cp "$debs"/*.deb "$root/packages"
  run "$apt g++ cmake make /packages/{liblockstep0,liblockstep-dev,lockstep-tools}_*.deb" &&
    run 'cmake -S examples/tutorial -B /tutorial && cmake --build /tutorial --target hello' &&
    hello 'lockstep run -n 2 -- /tutorial/hello' || return
  # The libtorch layer, if it is made for the system's libtorch.
  grep -q libtorch-dev <<<"$(dpkg-deb -f "$debs"/liblockstep-nn-*.deb Depends 2>/dev/null)" || return
  run 'apt-get install -y --no-install-recommends /packages/*.deb' &&
    run 'cmake -S examples/tutorial -B /tutorial && cmake --build /tutorial --target train' &&
    run 'lockstep run -n 2 -- /tutorial/train'
}

# Joins two hosts by a cable; they end with the processes in them. Sets the processes.
join_hosts() {
  local i own
  own=$(readlink /proc/self/ns/net)
  for i in 0 1; do
    unshare --net sleep infinity &
    hosts[i]=$!
    while [ "$(readlink "/proc/${hosts[i]}/ns/net")" = "$own" ]; do sleep 0.01; done
  done
  # Both ends are made on the first host, for this machine may have a cable of these names.
  nsenter --net="/proc/${hosts[0]}/ns/net" ip link add cable type veth peer name cable netns "${hosts[1]}" || return
  for i in 0 1; do
    nsenter --net="/proc/${hosts[i]}/ns/net" sh -ec \
      "ip addr add 10.79.0.$((i + 1))/24 dev cable; ip link set cable up; ip link set lo up" || return
  done
}

way_hosts() {
  if ! compgen -G "$debs/lockstep-ucx_*.deb" >/dev/null; then
    printf '\nhosts: skipped, there is no package lockstep-ucx\n'
    return
  fi
  begin hosts
  mkdir "$root/packages" && cp "$debs"/*.deb "$root/packages"
  local hosts=() began built node line='lockstep run -n 2 --nnodes 2 --rdzv 10.79.0.1:29400 --node-rank'
  join_hosts || { fail 'two network namespaces'; return 1; }
  run "$apt g++ cmake make /packages/{liblockstep0,liblockstep-dev,lockstep-tools,lockstep-ucx}_*.deb" &&
    run '! command -v mpirun && ! ldconfig -p | grep -E "libmpi|libtorch"' || return
  # UCX looks for network interfaces in /sys, which shows those of whoever mounts it.
  for node in 0 1; do
    printf '#!/bin/sh\nexec nsenter --net=/proc/%d/ns/net unshare --mount --propagation unchanged sh -c %s sh "$@"\n' \
      "${hosts[node]}" "'mount -t sysfs sysfs /sys && exec \"\$@\"'" >"$root/usr/local/bin/on-host$node"
    chmod +x "$root/usr/local/bin/on-host$node"
  done
  began=$EPOCHREALTIME
  run 'cmake -S examples/tutorial -B /tutorial && cmake --build /tutorial --target hello' || return
  built=$EPOCHREALTIME
  run "on-host1 $line 1 -- /tutorial/hello & on-host0 $line 0 -- /tutorial/hello && wait \$!" || return
  [ "$(grep -cx 'rank [0-3] of 4: the sum is 10' "$log")" = 4 ] || { fail "$line"; return 1; }
  awk -v began="$began" -v built="$built" -v ended="$EPOCHREALTIME" \
    'BEGIN { printf "%8.1f s from the installed packages, %.1f s of it on the two hosts\n", ended - began, ended - built }'
}

way_cmake() {
  begin cmake
  run "$apt g++ cmake ninja-build $libraries" &&
    run 'cmake -G Ninja -S . -B /build -DLOCKSTEP_{NN,TESTS,EXAMPLES,BENCH}=OFF -DCMAKE_UNITY_BUILD=ON' &&
    run 'cmake --build /build && cmake --install /build --prefix /prefix' &&
    run 'cmake -G Ninja -S examples/tutorial -B /tutorial -DCMAKE_PREFIX_PATH=/prefix' &&
    run 'cmake --build /tutorial --target hello' &&
    hello '/prefix/bin/lockstep run -n 2 -- /tutorial/hello'
}

way_pip() {
  begin pip
  run "$apt g++ cmake ninja-build libcli11-dev libsodium-dev python3-dev python3-venv" &&
    run 'python3 -m venv /venv && pip install .' &&
    hello 'lockstep run -n 2 -- python examples/python/hello.py' || return
  # The PyTorch of the package index takes several GB.
  [ -z "${RELEASE:-}" ] && compgen -G "$found/torch-*.whl" >/dev/null || return 0
  run 'apt-get install -y --no-install-recommends libcereal-dev nlohmann-json3-dev' &&
    run 'source scripts/packages.conf && pip install "$venv_torch" numpy && pip install . ./python/torch' &&
    run 'lockstep run -n 2 -- python examples/python/train.py --epochs 1' || return
  grep -q '^epoch 1: ' "$log" || fail train.py
}

way_wheels() {
  compgen -G 'build/dist/*.whl' >/dev/null || { printf '\nwheels: skipped, `./dev wheel` has made none\n' && return; }
  begin wheels
  cp -r build/dist "$root/wheels"
  run "$apt python3-venv" &&
    run 'python3 -m venv /venv && pip install --no-index --find-links /wheels lockstep-dist' &&
    hello 'lockstep run -n 2 -- python examples/python/hello.py' || return
  # That of PyTorch is for the Python of this system.
  [ -z "${RELEASE:-}" ] || return 0
  compgen -G 'build/dist/lockstep_torch-*.whl' >/dev/null || return 0
  run 'pip install /wheels/lockstep_torch-*.whl' &&
    run 'lockstep run -n 2 -- python examples/python/train.py --epochs 1' || return
  grep -q '^epoch 1: ' "$log" || fail train.py
}

way_wheel-from-source() {
  [ "${RELEASE:-}" = jammy ] || die 'wheel-from-source needs RELEASE=jammy'
  begin wheel-from-source
  run "$apt g++ libcli11-dev libsodium-dev libmpich-dev libopenmpi-dev libucx-dev python3-dev python3-venv" &&
    run 'python3 -m venv /venv && pip wheel --no-deps --wheel-dir /wheels .' || return
  # That of the stable ABI needs Python 3.12, which only newer systems have: compiled here, the wheel needs no newer glibc.
  echo "deb-src $ubuntu noble main" >"$root/etc/apt/sources.list.d/python.list"
  run "$apt dpkg-dev libffi-dev libssl-dev make zlib1g-dev" &&
    run 'mkdir /python && cd /python && apt-get source --download-only python3.12 && tar -xf *.orig.tar.xz --strip-components=1' &&
    run 'cd /python && ./configure --disable-test-modules OPT=-O1 && make -j"$(nproc)" install' &&
    run '/usr/local/bin/python3.12 -m pip wheel --no-deps --wheel-dir /wheels .' &&
    run 'pip install --no-index --find-links /wheels lockstep-dist' &&
    hello 'lockstep run -n 2 -- python examples/python/hello.py' || return
  mkdir -p build/wheel/unrepaired && cp "$root"/wheels/lockstep_dist-*.whl build/wheel/unrepaired
}

way_demo() {
  begin demo
  run './dev demo' || return
  grep -q '^largest difference' "$log" || fail './dev demo'
}

for name in "${ways[@]}"; do
  case $name in
    deb | hosts | cmake | pip | wheels | demo | wheel-from-source) "way_$name" ;;
    *) die "unknown way '$name', expected: deb, hosts, cmake, pip, wheels, demo, wheel-from-source" ;;
  esac
done
[ $failed -eq 0 ]
