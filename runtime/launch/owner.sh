# shellcheck shell=bash
# The person who launches, and the names of what that person creates: a part of tpu-vm.sh and of xpk.sh, so it
# needs no bash newer than 3.2.

# Prints the account that creates and deletes things: gcloud's. Several people may use one service account, so this
# machine's user stands before it.
account() {
    local account
    account="$(gcloud config get-value account 2> /dev/null)" || account=""
    # shellcheck disable=SC2154 # dry_run: the script that sources this file sets it
    [[ -n "$account" ]] || $dry_run || fail "gcloud is signed in with no account" "gcloud auth login"
    case "$account" in
        "" | *.gserviceaccount.com) account="$(id -un)@$account" ;;
    esac
    printf '%s' "$account"
}

# Prints a text in lower case, with a hyphen for all other characters than letters and digits.
#   plain TEXT LENGTH
plain() {
    local text
    text="$(printf '%s' "$1" | LC_ALL=C tr '[:upper:]' '[:lower:]' | LC_ALL=C tr -cs 'a-z0-9' '-')"
    text="${text#-}"
    text="${text:0:$2}"
    printf '%s' "${text%-}"
}

# Prints a number that differs between accounts, even if their plain texts are equal.
checksum() {
    printf '%s' "$1" | cksum | cut -d ' ' -f 1
}

# Prints the name of what a person creates from a recipe: RECIPE-USER.
#   default_name RECIPE ACCOUNT LENGTH
default_name() {
    local user
    user="$(plain "${2%%@*}" 20)"
    user="${user:-$(checksum "$2")}"
    printf '%s-%s' "$(plain "$1" "$(($3 - 1 - ${#user}))")" "$user"
}

# Prints an account as the value of a label, in at most 63 characters.
owner_label() {
    printf '%s-%s' "$(plain "$1" 52)" "$(checksum "$1")"
}

# Ends the script if the name that a variable gives is not valid in Google Cloud.
#   see_name VARIABLE NAME LENGTH
see_name() {
    if ((${#2} > $3)) || ! [[ "$2" =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]]; then
        fail "$1 is \`$2\`, which is not a valid name in Google Cloud" \
            "begin with a letter, use at most $3 lower-case letters, digits and hyphens, or: unset $1"
    fi
}
