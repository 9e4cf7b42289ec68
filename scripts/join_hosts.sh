# Sourced by recipes of several nodes, in the repository's root: starts Ray here and, by ssh, on the other nodes that the
# file HOSTS names (one a line, this node first, `#` begins a comment), and waits until all have joined. The cluster stays
# when the recipe ends; `ray stop` on every node ends it. Without HOSTS it does nothing: a cluster has to run already.
#
# Every node has the repository under the same path. Environment: PYTHON, RAY_PORT (6379), RAY_NODES_TIMEOUT_S (300).

if [[ -n "${HOSTS:-}" ]]; then
    [[ -f "$HOSTS" ]] || {
        echo "HOSTS=$HOSTS does not exist; name a file with one node a line, this node first" >&2
        exit 2
    }
    mapfile -t ray_hosts < <(sed -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' "$HOSTS")
    ((${#ray_hosts[@]} > 0)) || {
        echo "HOSTS=$HOSTS names no node; write one a line, this node first" >&2
        exit 2
    }
    duplicate=$(printf '%s\n' "${ray_hosts[@]}" | sort | uniq -d | head -n 1)
    [[ -z "$duplicate" ]] || {
        echo "HOSTS=$HOSTS names $duplicate twice; a node runs Ray once" >&2
        exit 2
    }
    ray_python=${PYTHON:-$here}
    ray_address=${ray_hosts[0]}:${RAY_PORT:-6379}
    # Only who holds this token may submit work to the cluster. It travels by standard input: arguments are seen by all.
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
    RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$("$ray_python" -c 'import secrets; print(secrets.token_hex(32))')}
    "$ray_python" -m ray.scripts.scripts start --head --disable-usage-stats \
        --node-ip-address "${ray_hosts[0]}" --port "${RAY_PORT:-6379}"
    for host in "${ray_hosts[@]:1}"; do
        printf '%s\n' "$RAY_AUTH_TOKEN" | ssh -o BatchMode=yes "$host" \
            "cd $(printf %q "$PWD") && read -r RAY_AUTH_TOKEN && export RAY_AUTH_TOKEN RAY_AUTH_MODE=token &&
             exec $(printf %q "$ray_python") -m ray.scripts.scripts start --disable-usage-stats --address $ray_address"
    done
    "$ray_python" scripts/slurm/wait_for_nodes.py "$ray_address" "${#ray_hosts[@]}" "${RAY_NODES_TIMEOUT_S:-300}"
    echo "Ray on ${#ray_hosts[@]} nodes, head ${ray_hosts[0]}; 'ray stop' on each ends it"
fi
