"""Test training commands of shell scripts: how the shell's syntax is read, and the resulting run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.lowering.hardware import from_text
from recipec.port.port import Asked, Ported, port
from recipec.port.shell import Shell, Unreadable, shown

MODEL = "--model_name_or_path Qwen/Qwen3-8B --dataset_name example/notes"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ported(folder: Path, text: str, **asked: object) -> Ported:
    (folder / "train.sh").write_text(text)
    return port([Path("train.sh")], Asked(from_text("v5p-8"), **asked))  # type: ignore[arg-type]


def value(made: Ported, path: str) -> object:
    assert made.ledger is not None, made.diagnostics
    return made.ledger.value(path)


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("run --a \\\n  'b c' \"d $x\"  # e", ["run", "--a", "b c", "d ${x}"]),
        ("x=(1 '2 3'); x+=(4)\nrun \"${x[@]}\"", ["run", "1", "2 3", "4"]),
        ("n=4; run $((n * 2)) $(( $n + k ))", ["run", "8", "${(( $n + k ))}"]),
        ("run ${1:-a} $1 ${y-'b c'}", ["run", "a", "${1}", "b", "c"]),
        ("x=1; if a; then x=2; else x=3; fi; run $x", ["run", "${x}"]),
        ("x=1 other; run $x", ["run", "${x}"]),
        ('c="run --a 1"; eval "$c 2"', ["run", "--a", "1", "2"]),
        ("run `date` $(echo ')' \")\")x", ["run", "${(date)}", "${(echo ')' \")\")}x"]),
        ("run \\\n# no comment ends a continued line\n", ["run"]),
        ("x=('1 2' 3); run ${x[0]} \"${x[0]}\"", ["run", "1", "2", "1 2"]),
    ],
)
def test_shell_parser_expands_command_words(script: str, command: list[str]) -> None:
    statements = Shell(script).read().statements
    found = [[shown(word.text) for word in each.words] for each in statements]
    assert command in found


@pytest.mark.parametrize("text", ["run 'a", 'run "a', "run $(a", "run ${a", "x=(a", "cat <<E\na\n", "run `a"])
def test_unclosed_shell_syntax_is_refused_at_its_position(text: str) -> None:
    with pytest.raises(Unreadable) as error:
        Shell(f"first line\n{text}").read()
    assert error.value.at >= len("first line\n")


def test_command_flags_override_config_and_keep_positions(here: Path) -> None:
    (here / "sft.yaml").write_text("learning_rate: 1.0e-4\nlora_r: 8\nuse_peft: true\n")
    text = f"R=16\naccelerate launch --num_processes 4 trl/scripts/sft.py \\\n {MODEL} --config sft.yaml"
    made = ported(here, f"{text} \\\n --lora_r=$R --lora_target_modules q_proj k_proj --no_packing\n")
    assert value(made, "lora.rank") == 16 and value(made, "lora.targets") == ["q_proj", "k_proj"]
    assert value(made, "train.optimizer.learning_rate") == 1e-4 and value(made, "data.packing") is False
    assert value(made, "train.global_batch_size") == 32  # 8 rows on each of 4 processes
    places = {row.key: row.place for row in made.rows}
    assert places["lora_r"] == "train.sh:4" and places["learning_rate"] == "sft.yaml:1"
    assert made.whole and set(made.files) == {"sft.yaml", "train.sh"}


def test_heredoc_is_read_as_config_of_later_command(here: Path) -> None:
    lines = [
        "M=Qwen/Qwen3-8B",
        "cat > c.yaml <<EOF",
        "model_name_or_path: $M",
        "dataset_name: example/notes",
        "EOF",
    ]
    made = ported(here, "\n".join([*lines, "trl sft --config c.yaml"]))
    assert value(made, "model.id") == "Qwen/Qwen3-8B"
    assert {row.key: row.place for row in made.rows}["dataset_name"] == "train.sh:4"


@pytest.mark.parametrize(
    "folder",
    [
        'R="$(cd "$(dirname "$0")/.." && pwd)"',
        'R="$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )/.." >/dev/null 2>&1 && pwd -P )"',
        'D=$(dirname "$(realpath $BASH_SOURCE)")\nR=$(dirname $D)',
        'D=$(dirname $(readlink -f "$0")); R=$D/..',
    ],
)
def test_the_folder_of_the_script_is_known(here: Path, folder: str) -> None:
    for name in ("scripts", "configs"):
        (here / name).mkdir()
    (here / "configs" / "sft.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\ndataset_name: a/b\n")
    script = Path("scripts", "train.sh")
    script.write_text(
        f'{folder}\ncd "$R/configs"\ntrl sft --config "$R/configs/sft.yaml" --output_dir $R/out\n'
    )
    for named in (script, here / script):
        made = port([named], Asked(from_text("v5p-8")))
        assert made.whole and value(made, "model.id") == "Qwen/Qwen3-8B", made.diagnostics
        (place,) = (row for row in made.rows if row.key == "output_dir")
        assert place.value.endswith("out") and str(here) not in place.value
    own = "model_name_or_path: Qwen/Qwen3-4B\n"
    script.write_text(f'{folder}\ncat > "$R/own.yaml" <<E\n{own}E\ntrl sft --config $R/own.yaml')
    made = port([script], Asked(from_text("v5p-8")))
    assert value(made, "model.id") == "Qwen/Qwen3-4B"


@pytest.mark.parametrize("place", ['$(cd "$ROOT" && pwd)', "$(dirname $1)", "$(cd .. && pwd)", "$(pwd)"])
def test_other_folders_are_not_guessed(here: Path, place: str) -> None:
    made = ported(here, f"trl sft {MODEL} --dataset_name {place}")
    (found,) = (d for d in made.diagnostics if d.code == "E1107")
    assert f"`{place}`, which is known only when the script runs" in found.message
    made = ported(here, f"trl sft {MODEL} --dataset_name $(basename {60 * 'a'})")
    (found,) = (d for d in made.diagnostics if d.code == "E1107")
    assert "is known only when the script runs" in found.message


@pytest.mark.parametrize(
    ("launch", "rows"),
    [
        ("torchrun --nproc_per_node 4 --nnodes=2 trl/scripts/sft.py", 64),
        ("deepspeed --include localhost:0,3 trl/scripts/sft.py", 16),
        ("CUDA_VISIBLE_DEVICES=0,1,2 trl sft", 24),
        ("python -u -m torch.distributed.run --standalone --nproc_per_node=2 trl/scripts/sft.py", 16),
        ('srun --nodes 2 bash -c "accelerate launch --multi_gpu --num_processes 4 scripts/run_sft.py', 32),
    ],
)
def test_launcher_options_determine_gpu_count(here: Path, launch: str, rows: int) -> None:
    made = ported(here, f"{launch} {MODEL}" + '"' * launch.count('"'))
    assert value(made, "train.global_batch_size") == rows
    assert made.whole, made.diagnostics


def test_unset_variable_of_an_override_is_no_reference_to_a_key(here: Path) -> None:
    examples = Path(__file__).parent / "examples"
    for tool, command, key in (
        (
            "torchtune-llama31-lora/lora.yaml",
            "tune run lora_finetune_single_device --config run.yaml",
            "batch_size",
        ),
        ("oumi-qwen3-lora/train.yaml", "oumi train -c run.yaml --training.seed", "training.seed"),
    ):
        (here / "run.yaml").write_text((examples / tool).read_text())
        text = f"{command} {key}=" if "tune" in command else f"{command} "
        made = ported(here, f"{text}${{seed}}\n")
        errors = [each for each in made.diagnostics if each.severity == "error"]
        assert [(each.code, each.path) for each in errors] == [("E1107", key)]
        assert errors[0].help is not None and ported(here, f"{text}${{seed}}\n", sets=(f"{key}=2",)).whole


def test_litgpt_torchtune_llamafactory_and_kto_commands_are_ported(here: Path) -> None:
    made = ported(
        here, "litgpt finetune_lora meta-llama/Llama-3.2-1B --data JSON --data.json_path a.json --lora_r 4"
    )
    assert value(made, "lora.rank") == 4 and value(made, "model.id") == "meta-llama/Llama-3.2-1B"
    examples = Path(__file__).parent / "examples"
    (here / "lora.yaml").write_text((examples / "torchtune-llama31-lora" / "lora.yaml").read_text())
    tune = "tune run --nproc_per_node 2 lora_finetune_distributed --config lora.yaml"
    made = ported(here, f"{tune} model.lora_rank=64 ~dataset.packed")
    assert value(made, "lora.rank") == 64 and value(made, "train.global_batch_size") == 32
    assert value(made, "data.packing") is False
    flags = "--stage sft --finetuning_type lora --lora_rank 4 --template qwen3 --dataset a --bf16"
    made = ported(here, f"python src/train_bash.py --model_name_or_path Qwen/Qwen3-8B {flags}")
    assert made.title == "LLaMA-Factory" and value(made, "lora.rank") == 4
    made = ported(here, f"trl kto {MODEL} --per_device_train_batch_size 2 --desirable_weight 1.5")
    assert value(made, "train.objective") == "kto" and value(made, "train.desirable_weight") == 1.5


def test_shell_script_is_not_run_and_outside_config_is_refused(here: Path) -> None:
    inside = here / "inside"
    inside.mkdir()
    (here / "sft.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\n")
    (inside / "link.yaml").symlink_to(here / "sft.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inside)
        for name in ("link.yaml", "../sft.yaml", f"{here}/sft.yaml"):
            made = ported(inside, f"touch {here}/ran `touch {here}/ran`\ntrl sft --config {name}")
            assert [d.code for d in made.diagnostics] == ["E1187"], name
    assert not (here / "ran").exists()


def test_secrets_are_never_shown(here: Path) -> None:
    keys = ["hf_abcdefghijklmnopqrstuvwx", "0123456789abcdef0123456789abcdef01234567"]
    text = (
        f"export WANDB_API_KEY={keys[1]}\nHF_TOKEN={keys[0]} trl sft {MODEL} --hub_token {keys[0]} --lora_q 1"
    )
    (here / "train.sh").write_text(f"{text} --run_name $WANDB_API_KEY\n")
    result = CliRunner().invoke(app, ["port", "train.sh", "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 0 and "lora_q" in result.stderr
    assert not any(key in result.output + result.stderr for key in keys)


def test_a_pasted_command_is_read_from_stdin(here: Path) -> None:
    result = CliRunner().invoke(app, ["port", "-"], input=f"$ trl sft {MODEL}\n", catch_exceptions=False)
    assert result.exit_code == 0 and "id: Qwen/Qwen3-8B" in result.stdout


def test_command_option_selects_one_of_several_commands(here: Path) -> None:
    text = f"trl sft {MODEL} --seed 1\ntrl sft {MODEL} --seed 2\n"
    assert [d.code for d in ported(here, text).diagnostics] == ["E1181"]
    assert value(ported(here, text, command=2), "train.seed") == 2
    assert [d.code for d in ported(here, text, command=3).diagnostics] == ["E1181"]


def test_scripts_that_only_sound_like_training_are_no_commands_next_to_a_tools(here: Path) -> None:
    others = "python format_sft.py\npython $ROOT/merge.py\npython tools/train_tokenizer.py\n"
    made = ported(here, f"{others}trl sft {MODEL} --seed 2\n")
    assert made.whole and value(made, "train.seed") == 2
    made = ported(here, others + "llamafactory-cli train a.yaml\nllamafactory-cli train b.yaml")
    (found,) = made.diagnostics
    assert found.code == "E1181" and (found.help or "").split("\n")[1:] == [
        "  --command 1: llamafactory-cli train a.yaml (line 4)",
        "  --command 2: llamafactory-cli train b.yaml (line 5)",
    ]
    assert [d.code for d in ported(here, others).diagnostics] == ["E1181"]
    (found,) = ported(here, 'llamafactory-cli train "configs/$1"').diagnostics
    assert found.code == "E1185" and "`$1`" in found.message
    (found,) = ported(here, 'llamafactory-cli train "${1#./}"').diagnostics
    assert found.code == "E1185" and "`${1#./}`" in found.message


@pytest.mark.parametrize(
    "text",
    [
        "\0\0trl sft",
        "",
        "\n" * 100_000,
        "if a;then b=$c;fi;" * 10_000,
        "((((" * 9000,
        'trl sft "\\',
        '"$(' * 9000,
    ],
)
def test_malformed_shell_script_gives_one_diagnostic(here: Path, text: str) -> None:
    assert [d.code[:4] for d in ported(here, text).diagnostics] == ["E118"]


def test_folder_port_writes_recipes_and_prints_a_table(here: Path) -> None:
    source = here / "runs"
    (source / "sub").mkdir(parents=True)
    examples = Path(__file__).parent / "examples"
    for name in ("accelerate.yaml", "sft.yaml"):
        (source / name).write_text((examples / "trl-llama32-fsdp" / name).read_text())
    qlora = (examples / "axolotl-gemma4-qlora" / "support-qlora.yml").read_text()
    (source / "sub" / "one.yml").write_text(qlora)
    (source / "sub" / "two.yml").write_text(qlora.replace("field_messages: turns", "field_messages: talk"))
    (source / "two.sh").write_text(f"trl sft {MODEL}\ntrl reward {MODEL}\n")
    (source / "notes.yaml").write_text("a: 1\n")
    result = CliRunner().invoke(app, ["port", "runs", "-o", "out"], catch_exceptions=False)
    assert result.exit_code == 1 and result.stderr == "4 of 5 runs ported\n"
    table = {line.rpartition("  ")[0].split("  ")[0]: line for line in result.stdout.splitlines()[1:]}
    assert list(table) == [
        "runs/sft.yaml",
        "runs/sub/one.yml",
        "runs/sub/two.yml",
        "runs/two.sh (1)",
        "runs/two.sh (2)",
    ]
    assert "E1171:2" in table["runs/two.sh (2)"] and "out/two-1.yaml" in table["runs/two.sh (1)"]
    made = sorted(path.relative_to("out").as_posix() for path in Path("out").rglob("*.yaml"))
    assert "accelerate.yaml" in (here / "out" / "sft.yaml").read_text()
    for name in made:
        assert CliRunner().invoke(app, ["check", f"out/{name}"]).exit_code == 0, name
    again = CliRunner().invoke(app, ["port", "runs", "-o", "out"], catch_exceptions=False)
    assert again.stderr == "0 of 5 runs ported\n" and again.stdout.count("exists already") == 4
    (here / "empty").mkdir()
    assert "E1188" in CliRunner().invoke(app, ["port", "empty"]).stderr


TUNIX, SECTION = "python -m tunix.cli.peft_main", "optimizer_config.opt_type=adamw optimizer_config"
RATE = "train.optimizer.learning_rate"
SWIFT = "--use_hf true --model Qwen/Qwen3-8B --dataset a/b c/d --tuner_type lora --max_length 512"


@pytest.mark.parametrize(
    ("command", "title", "path", "expected"),
    [
        (
            f"swift sft {SWIFT} --target_modules q_proj v_proj",
            "ms-swift",
            "lora.targets",
            ["q_proj", "v_proj"],
        ),
        (f"NPROC=2\nswift rlhf --rlhf_type dpo {SWIFT}", "ms-swift", "train.objective", "dpo"),
        ("oumi train -c train.yaml --training.seed 7", "oumi", "train.seed", 7),
        ("automodel finetune llm -c lora.yaml --peft.dim 4", "NeMo AutoModel", "lora.rank", 4),
        (
            "python -m maxtext.trainers.post_train.sft.train_sft sft.yml model_name=qwen3-8b steps=100",
            "MaxText",
            "train.steps",
            100,
        ),
        (f"{TUNIX} base_config.yaml batch_size=8 {SECTION}.learning_rate=2e-5", "Tunix", RATE, 2e-5),
        (f"{TUNIX} lora.yaml {SECTION}.learning_rate=2e-5", "Tunix", "train.optimizer.b2", 0.999),
        (f"{TUNIX} base_config.yaml override_config_file=lora.yaml", "Tunix", "train.optimizer.b2", 0.95),
    ],
)
def test_command_flags_of_each_tool_override_its_config(
    here: Path, command: str, title: str, path: str, expected: object
) -> None:
    examples = Path(__file__).parent / "examples"
    config = {
        "oumi": "oumi-qwen3-lora/train.yaml",
        "NeMo AutoModel": "automodel-llama32-lora/lora.yaml",
        "Tunix": "tunix-qwen3-lora/lora.yaml",
    }.get(title)
    if config:
        shutil.copy(examples / config, here)
    made = ported(here, command)
    assert made.title == title and value(made, path) == expected


def test_tunix_base_config_with_override_file_is_warned_about_or_refused(here: Path) -> None:
    shutil.copy(Path(__file__).parent / "examples" / "tunix-qwen3-lora" / "lora.yaml", here)
    (here / "base_config.yaml").write_text("batch_size: 64\n")
    (here / "other.yaml").write_text("batch_size: 64\n")
    made = ported(here, f"{TUNIX} base_config.yaml override_config_file=lora.yaml")
    assert "W1186" in [found.code for found in made.diagnostics]
    (found,) = ported(here, f"{TUNIX} other.yaml override_config_file=lora.yaml").diagnostics
    assert found.code == "E1110" and found.help and found.span is not None and found.span.line == 1


@pytest.mark.parametrize(
    "command",
    [
        f"swift pt {SWIFT}",
        "python -m maxtext.trainers.pre_train.train base.yml model_name=qwen3-8b",
        "python -m tunix.cli.grpo_main base_config.yaml",
    ],
)
def test_unsupported_commands_of_supported_tools_are_refused(here: Path, command: str) -> None:
    (found,) = ported(here, command).diagnostics
    assert found.code == "E1193" and found.span is not None and found.span.line == 1


def test_exponential_variable_expansion_is_refused() -> None:
    with pytest.raises(Unreadable, match="expand"):
        Shell("x=ab\n" + "x=$x$x\n" * 60 + "run $x").read()
