cd "$(dirname "$0")"
axolotl train configs/$1.yaml
