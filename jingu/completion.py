"""`jingu completion SHELL`: a script that completes commands, options and their values, from the table of commands.

Everything else that a command takes is a file or a setting, so the shell completes files there. Plug-ins do not change
the table, and the script needs no Python when it completes.
"""

from __future__ import annotations

from collections.abc import Iterator

_BASH = """\
# Completion of jingu: eval "$(jingu completion {command})"
{prelude}_jingu() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=
    if ((COMP_CWORD > 2)); then
        case "$command ${{COMP_WORDS[2]}}" in
            {pairs}) command="$command ${{COMP_WORDS[2]}}" ;;
        esac
    fi
    if ((COMP_CWORD == 1)); then
        words="{firsts}"
    else
        case "$command $previous" in
{values}
        esac
        if [[ -z $words && $word == -* ]]; then
            case "$command" in
{options}
            esac
        elif [[ -z $words ]] && ((COMP_CWORD == 2)); then
            case "$command" in
{members}
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _jingu jingu
"""
_ZSH_PRELUDE = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def print_completion(shell: str) -> None:
    """Print the script for a shell: bash, zsh (which runs that of bash) or fish."""
    print("\n".join(_fish_lines()) if shell == "fish" else _bash_script(shell), end="\n" if shell == "fish" else "")


def _options() -> dict[str, dict[str, list[str]]]:
    """Return the options of each command, with the values that each can have; none if it takes any."""
    # The table has this command, too.
    from jingu.command_table import COMMANDS

    return {
        name: {
            argument: list(keywords.get("choices", ()))
            for argument, keywords in command.arguments
            if argument.startswith("-")
        }
        | ({"--processes": []} if command.on_ranks else {})
        | {"--help": []}
        for name, command in COMMANDS.items()
    }


def _groups(names: list[str]) -> dict[str, list[str]]:
    """Return the second words of commands by their first."""
    groups: dict[str, list[str]] = {}
    for name in names:
        first, _, second = name.partition(" ")
        groups.setdefault(first, []).extend([second] if second else [])
    return groups


def _bash_script(shell: str) -> str:
    options = _options()
    groups = _groups(list(options))
    values = [
        f'            "{name} {option}") words="{" ".join(choices)}" ;;'
        for name, table in options.items()
        for option, choices in table.items()
        if choices
    ]
    return _BASH.format(
        command=shell,
        prelude=_ZSH_PRELUDE if shell == "zsh" else "",
        pairs="|".join(f'"{name}"' for name in options if " " in name),
        firsts=" ".join(groups),
        values="\n".join(values),
        options="\n".join(f'                "{name}") words="{" ".join(table)}" ;;' for name, table in options.items()),
        members="\n".join(
            f'                "{first}") words="{" ".join(seconds)}" ;;' for first, seconds in groups.items() if seconds
        ),
    )


def _fish_lines() -> Iterator[str]:
    options = _options()
    yield "# Completion of jingu: jingu completion fish | source"
    for first, seconds in _groups(list(options)).items():
        yield f"complete -c jingu -n __fish_use_subcommand -f -a {first}"
        if seconds:
            condition = f"__fish_seen_subcommand_from {first}; and not __fish_seen_subcommand_from {' '.join(seconds)}"
            yield f"complete -c jingu -n '{condition}' -a '{' '.join(seconds)}'"
    for name, table in options.items():
        condition = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        for option, choices in table.items():
            kind = "-l" if option.startswith("--") else "-s"
            ending = f" -x -a '{' '.join(choices)}'" if choices else ""
            yield f"complete -c jingu -n '{condition}' {kind} {option.lstrip('-')}{ending}"
