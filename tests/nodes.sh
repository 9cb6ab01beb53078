#!/bin/sh
# Two nodes on this machine, which are network namespaces: eth0 joins them, dead0 leads nowhere.
#   nodes.sh add A B; nodes.sh remove A B
#   nodes.sh enter A HOST FOLDER PLACE COMMAND: runs it there, with FOLDER in the place of another
set -e
verb=$1
shift
case $verb in
add)
    command -v unshare >/dev/null || { echo "unshare is missing" >&2; exit 1; }
    for node; do ip netns add "$node"; done
    ip link add netns "$1" name eth0 type veth peer netns "$2" name eth0
    i=0
    for node; do
        i=$((i + 1))
        ip -n "$node" link add dead0 type veth peer dead1
        ip -n "$node" address add 10.77.0.$i/24 dev eth0
        ip -n "$node" address add 10.78.0.$i/24 dev dead0
        for device in lo eth0 dead0 dead1; do ip -n "$node" link set $device up; done
    done
    ;;
remove)
    for node; do
        ip netns pids "$node" | xargs -r kill -9
        ip netns delete "$node"
    done
    ;;
enter)
    node=$1
    shift
    exec ip netns exec "$node" unshare --uts --mount sh -c 'echo "$1" > /proc/sys/kernel/hostname &&
        mount --bind "$2" "$3" && cd "$3" && shift 3 && exec "$@"' sh "$@"
    ;;
esac
