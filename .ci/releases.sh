# Sourced by `run`, `matrix` and `tools`: the releases that are tested, read from where the project declares them, and
# environments for others.

declared() { sed -n "s/^ *\"$1>=\([0-9.]*\)\".*/\1/p" pyproject.toml; }
tested() { sed -n "s/^$1==\([0-9.]*\).*/\1/p" constraints.txt; }
floor=$(declared transformers)
torch_floor=$(declared torch)
last_old_name=5.23.0  # of the cache's argument

if [[ -z $floor || -z $torch_floor ]]; then
    echo 'pyproject.toml must declare floors for transformers and torch' >&2
    exit 1
fi

step() { printf '\n== %s (%d s so far)\n' "$1" "$SECONDS"; }

# cpu_build PYTHON VERSION: how pip names the build of that release of torch for the CPU, nothing where it finds none.
# On Linux with x86-64 the plain name may bring gigabytes of CUDA, unless the configured index has builds for the CPU
# alone; elsewhere it is such a build.
cpu_build() {
    local python=$1 name found
    for name in "$2+cpu" "$2"; do
        found=$("$python" -m pip install --dry-run --quiet --ignore-installed --no-deps --only-binary :all: --report - \
            "torch==$name" 2> /dev/null | "$python" -c 'import json, sys
print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2> /dev/null) || continue
        if [[ $found == *+cpu || $(uname -sm) != 'Linux x86_64' ]]; then
            printf '%s' "$name"
            return
        fi
    done
}

# site_packages ENVIRONMENT: the absolute folder of its packages
site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# behind_tested FOLDER: a new environment that sees the packages of .venv behind its own
behind_tested() {
    local tested own
    rm -rf "$1"
    .venv/bin/python -m venv --without-pip "$1"  # pip, too, is the one of .venv
    tested=$(site_packages .venv)
    own=$(site_packages "$1")
    printf 'import site; site.addsitedir("%s")\n' "$tested" > "$own/tested.pth"
}
