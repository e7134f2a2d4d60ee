#!/usr/bin/env bash
# Installs what the tests of the UCX transport want from the system: UCX with its headers, its own benchmark, and
# the `ip` command, which makes network namespaces. On Debian and Ubuntu, as root, by apt-get, and only what is
# missing; elsewhere it prints the command. pdkv itself needs none of this: it looks for UCX when it runs.
# With PDKV_UCX_REQUIRED=1, as in CI, anything missing at the end is a failure.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin" # where `ip` may be, and a user's PATH may not

missing_packages() {
    printf '#include <ucp/api/ucp.h>\n' | cc -E -xc - >/dev/null 2>&1 || echo libucx-dev
    command -v ucx_perftest >/dev/null || echo ucx-utils
    command -v ip >/dev/null || echo iproute2
}

mapfile -t missing < <(missing_packages)
if [ ${#missing[@]} -eq 0 ]; then
    echo "the system has UCX $(ucx_info -v | grep -oEm1 '[0-9]+\.[0-9]+\.[0-9]+'), its headers and tools: nothing to install"
    exit 0
fi

install=(apt-get install -y --no-install-recommends "${missing[@]}")
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # A fresh machine has no list of packages yet; one that has it need not wait for a new one.
    "${install[@]}" >/dev/null 2>&1 || { apt-get update -qq && "${install[@]}" >/dev/null; } || true
    mapfile -t missing < <(missing_packages)
    [ ${#missing[@]} -gt 0 ] || exit 0
    echo "could not install ${missing[*]}" >&2
else
    echo "to run every test of the UCX transport: sudo ${install[*]}"
fi
[ "${PDKV_UCX_REQUIRED:-}" != 1 ]
