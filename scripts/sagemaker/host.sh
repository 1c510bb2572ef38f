#!/usr/bin/env bash
# Turns a process of local_job.py into a host, which runs a command; $1: its folder, $2: its address,
# then the command. The host outlives the command, as a machine does: others find its ports closed,
# not the host gone.
set -euo pipefail
mount --make-rprivate /
mkdir "$1/opt"
for entry in /opt/*; do
  name="$1/opt/${entry##*/}"
  if [ -d "$entry" ]; then mkdir "$name"; else touch "$name"; fi
  [ "${entry##*/}" = ml ] || mount --bind "$entry" "$name"
done
mkdir -p "$1/opt/ml"
mount --bind "$1/ml" "$1/opt/ml"
mount --rbind "$1/opt" /opt
mount --bind "$1/hosts" /etc/hosts
touch "$1/environment"
mount --bind "$1/environment" /etc/environment
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir -m 755 /run/sshd /run/tmp
if [ -d /etc/ssh ]; then mount --bind "$1/../.ssh" /etc/ssh; fi
hostname "${1##*/}"
ip link set lo up
while ! ip link show eth0 >"$1/link" 2>&1; do sleep 0.05; done
ip address add "$2/24" dev eth0
ip link set eth0 up
set +e
folder=$1
shift 2
"$@"
echo $? >"$folder/code.new"
kill -KILL -1 2>"$folder/killed"
mv "$folder/code.new" "$folder/code"
exec sleep infinity
