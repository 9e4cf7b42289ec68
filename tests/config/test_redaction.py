"""No secret of a user gets into files, logs or what is shown."""

import io
import json
import logging
from pathlib import Path

import pytest

from rlkit.cli.dry_run import print_dry_run
from rlkit.cli.entry import prepare_run
from rlkit.config.fields import all_fields
from rlkit.config.load import load_config, to_json
from rlkit.config.redaction import HIDDEN, holds_secret, redacted_config, without_credentials, without_secrets
from rlkit.observability.logs import set_up_logging

SECRETS = ("hf_abcdefgh1234", "s3cr3t-password", "tok-9876543210")


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "x"}')
    (tmp_path / "p.jsonl").write_text('{"input": "x"}\n')
    variables = {"HF_TOKEN": SECRETS[0], "NCCL_DEBUG": "INFO", "MY_SERVICE_PASSWORD": SECRETS[1]}
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(tmp_path / "p.jsonl"), "--num-rollout", "1"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--colocate", "--rm-type", "remote_rm"),
        *("--rm-url", f"http://user:{SECRETS[1]}@grader:80/rm?api_key={SECRETS[2]}&x=1"),
        *("--train-env-vars", json.dumps(variables), "--output-dir", str(tmp_path / "run")),
    ]


def test_the_saved_configuration_holds_no_secret(argv: list[str]):
    plan = prepare_run(argv)
    text = json.dumps(plan.config_json)
    assert not any(secret in text for secret in SECRETS)
    shown = plan.config_json["cluster"]["train_env_vars"]["value"]
    assert shown == {"HF_TOKEN": HIDDEN, "NCCL_DEBUG": "INFO", "MY_SERVICE_PASSWORD": HIDDEN}
    assert plan.config_json["reward"]["rm_url"]["value"] == f"http://{HIDDEN}@grader:80/rm?api_key={HIDDEN}&x=1"
    assert plan.cfg.cluster.train_env_vars["HF_TOKEN"] == SECRETS[0], "the run itself needs it"


def test_the_dry_run_shows_no_secret(argv: list[str]):
    file = io.StringIO()
    print_dry_run(load_config(argv), file)
    assert not any(secret in file.getvalue() for secret in SECRETS)
    assert "NCCL_DEBUG" in file.getvalue()


def test_the_log_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRETS[2])
    path = set_up_logging(tmp_path, "driver")
    logger = logging.getLogger("test")
    logger.info("logging in with %s at https://me:%s@host/", SECRETS[2], SECRETS[1])
    try:
        raise ValueError(f"refused: {SECRETS[2]}")
    except ValueError:
        logger.exception("failed")
    text = path.read_text()
    assert text.count(HIDDEN) >= 3 and not any(secret in text for secret in SECRETS)
    assert "https://***@host/" in text


def test_everything_else_is_written_as_it_is(argv: list[str]):
    resolved = load_config(argv)
    whole = to_json(resolved)
    hidden = redacted_config(whole)
    for name, field in all_fields().items():
        if name not in ("train_env_vars", "rm_url"):
            assert hidden[field.section][name] == whole[field.section][name], name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "password", "GITHUB_PAT")),
        *(
            (name, False)
            for name in ("NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "PATH", "MAX_TOKENS")
        ),
    ],
)
def test_names_of_secrets(name: str, expected: bool):
    assert holds_secret(name) is expected


def test_addresses_lose_their_credentials_only():
    assert (
        without_credentials("see https://a:b@c.d/e and http://f.g/h?i=j")
        == "see https://***@c.d/e and http://f.g/h?i=j"
    )
    assert without_credentials("mail a@b.c, step 3@4") == "mail a@b.c, step 3@4"


def test_short_values_are_no_secrets():
    assert without_secrets("on and on", {"MY_KEY": "on"}) == "on and on"
