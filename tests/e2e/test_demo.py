"""`skein demo`, shortened: everything starts, trains, exports and ends; transformers agrees on what was trained."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skein.config.load import parse_job
from tests.e2e.shared import left_running, marked
from worker.data.dataset import open_dataset


@pytest.mark.long
def test_the_demo_leaves_a_model_that_transformers_opens_and_nothing_running(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    short = ("--set", "budget.steps=12", "--set", "optimizer.warmup_steps=3")
    ran = subprocess.run(
        [sys.executable, "-m", "client.cli", "demo", "--dir", str(folder), *short],
        capture_output=True,
        text=True,
        env={**marked(folder), "NO_COLOR": "1"},
        timeout=600,
        check=False,
    )
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert "Traceback" not in said
    assert "opened with transformers" in said
    assert left_running(folder) == []
    assert {path.name for path in (folder / "export").iterdir()} >= {"README.md", "tokenizer.json"}

    job = parse_job((folder / "job.yaml").read_text(), origin="job.yaml")
    dataset = open_dataset(job.data, job.model, seed=job.seed)
    batch = dataset.validation_batch(range(job.evaluation.samples))
    model = AutoModelForCausalLM.from_pretrained(folder / "export")
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.inputs)).logits
    labels = torch.from_numpy(batch.labels)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
    # The demo prints three decimals.
    [told] = [line.split()[-1] for line in said.splitlines() if line.startswith("step 12  validation loss")]
    assert float(told) == pytest.approx(loss, abs=6e-4)
