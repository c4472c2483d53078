"""Job files: what is read, what is refused, and that each refusal names field, value and what would be right."""

import json
from pathlib import Path

import pytest

from skein.config.data.sources import TextSource
from skein.config.job import JobSpec
from skein.config.load import (
    MAX_CHARACTERS,
    JobFileErrors,
    apply_overrides,
    job_from_json,
    job_schema,
    parse_document,
    parse_job,
)
from skein.config.optimizer import AdamWSpec
from skein.config.resources import ResourcesSpec
from skein.model.families.llama import LlamaModel
from tests.contract.source import ROOT

GOOD = """
name: first-job
model: {family: llama, preset: llama-1m}
data:
  sources: [{format: text, path: /books}]
budget: {steps: 3}
"""
LATER = "tokens see later ones by it, and a model that writes has none: give allow_lookahead: true if meant"
EVEN = "no token chooses, so all experts take equally many: leave it out"
SOFT = "router: softmoe, allow_lookahead: true"
FAMILIES = "digits_cnn, llama, mistral, mixtral, mlp, qwen2, qwen3 or qwen3_moe"
TOP = (
    "version, name, model, data, batch, parallel, skip, plan, optimizer, aggregation, precision, budget, evaluation, "
    "checkpoint, recovery, backup, on_divergence, checks, seed, priority, resources, sweep"
)
STEPS = "give a whole number from 1 to 100000000, or null"
NO_BUDGET = "budget.steps: none: give steps, tokens or epochs, with hours beside them if wanted"
RATE = "give a number above 0 and at most 10"
BETA = "give a number of at least 0 and below 1"
BETAS = "give a list of 2, each a number of at least 0 and below 1"
NAME = "give text: 1 to 63 lower-case letters, digits and inner hyphens"
FORMATS = "give a mapping whose format is arrays, digits, jsonl, parquet, text or tokens"
SOURCES = (
    "give a list of 1 to 64, each a mapping whose format is arrays, digits, jsonl, parquet, text or tokens"
)
LABEL = "give KEY=VALUE, each of up to 64 letters, digits, dots, dashes and underscores, as in gpu=h100"
SYNTAX = "check indentation, colons, brackets and quotes there"

# One change to a good job, and the whole of what is said about it.
WRONG_VALUES = {
    "resources.labels={gpu: h 100}": f"resources.labels: 'gpu=h 100': {LABEL}",
    "resources.labels={gpu: 80}": "resources.labels.gpu: 80: give text",
    "resources.labels=[gpu]": "resources.labels: ['gpu']: give a mapping",
    "budget.steps=true": f"budget.steps: true: {STEPS}",
    "budget.steps='5'": f"budget.steps: '5': {STEPS}",
    "budget.steps=5.5": f"budget.steps: 5.5: {STEPS}",
    "budget.steps=0": f"budget.steps: 0: {STEPS}",
    "budget.steps=-1": f"budget.steps: -1: {STEPS}",
    "budget.steps=": NO_BUDGET,
    "budget.steps=010": f"budget.steps: '010': {STEPS}",
    "budget.steps=12:30": f"budget.steps: '12:30': {STEPS}",
    "budget.steps=[5]": f"budget.steps: [5]: {STEPS}",
    "budget={}": NO_BUDGET,
    "budget=7": "budget: 7: give a mapping of steps, tokens, epochs, hours",
    "optimizer.learning_rate=0": f"optimizer.learning_rate: 0: {RATE}",
    "optimizer.learning_rate=.nan": f"optimizer.learning_rate: nan: {RATE}",
    "optimizer.learning_rate=.inf": f"optimizer.learning_rate: inf: {RATE}",
    "optimizer.learning_rate=fast": f"optimizer.learning_rate: 'fast': {RATE}",
    "optimizer.betas=0.9": f"optimizer.betas: 0.9: {BETAS}",
    "optimizer.betas=[0.9]": f"optimizer.betas: [0.9]: {BETAS}",
    "optimizer.betas=[0.9, 0.9, 0.9]": f"optimizer.betas: [0.9, 0.9, 0.9]: {BETAS}",
    "optimizer.betas=[0.9, 1]": f"optimizer.betas[1]: 1: {BETA}",
    "optimizer.clip_norm=0": "optimizer.clip_norm: 0: give a number above 0, or null",
    "optimizer.name=sdg": "optimizer.name: 'sdg': give adadelta, adam, adamw, lamb or sgd; did you mean sgd?",
    "optimizer=7": "optimizer: 7: give a mapping whose name is adadelta, adam, adamw, lamb or sgd",
    "optimizer={name: sgd, betas: [0.9, 0.9]}": "optimizer.betas: [0.9, 0.9]: no such key: "
    "it belongs to name: adam, adamw or lamb; with name: sgd here are "
    "learning_rate, schedule, final_learning_rate_ratio, drop_every_steps, drop_ratio, warmup_steps, weight_decay, "
    "clip_norm, name, momentum, nesterov",
    "optimizer={name: sgd, momentum: 0, nesterov: true}": "optimizer.nesterov: true: give false, or a momentum above 0",
    "optimizer={name: lamb, min_ratio: 20}": "optimizer.min_ratio: 20.0: give at most max_ratio (10)",
    "optimizer={min_ratio: 20}": "optimizer.min_ratio: 20: no such key: "
    "it belongs to name: lamb; with name: adamw here are learning_rate, schedule, "
    "final_learning_rate_ratio, drop_every_steps, drop_ratio, warmup_steps, weight_decay, clip_norm, name, betas, eps",
    "aggregation={rule: gossip, method: decentlm}": "aggregation.method: 'decentlm': "
    "give decentlam, dsgd, dmsgd, da_dmsgd or qg_dmsgd; did you mean decentlam?",
    "aggregation={rule: DiLoCo}": "aggregation.rule: 'DiLoCo': "
    "give all_reduce, diloco, gossip, lsgd, one_bit_adam or one_bit_lamb; did you mean diloco?",
    "aggregation={local_steps: 50}": "aggregation.local_steps: 50: no such key: "
    "it belongs to rule: diloco; with rule: all_reduce here are rule, wire, pattern, robust",
    "optimizer.schedule=steps": "optimizer.schedule: 'steps': "
    "give cosine, linear, constant or step; did you mean step?",
    "optimizer.schedule=step": "optimizer.schedule: 'step': give drop_every_steps too, such as 1000",
    "optimizer.drop_every_steps=9": "optimizer.drop_every_steps: 9: "
    "schedule cosine drops nothing: leave it away, or give schedule: step",
    "optimizer.lerning_rate=0.1": "optimizer.lerning_rate: 0.1: no such key: did you mean learning_rate? here are "
    "learning_rate, schedule, final_learning_rate_ratio, drop_every_steps, drop_ratio, warmup_steps, "
    "weight_decay, clip_norm, name, betas, eps",
    "learning_rate=0.1": f"learning_rate: 0.1: no such key: did you mean optimizer.learning_rate? here are {TOP}",
    "steps=5": f"steps: 5: no such key: did you mean budget.steps? here are {TOP}",
    "zebra=[]": f"zebra: []: no such key: here are {TOP}",
    "precision=fp8": "precision: 'fp8': give fp32, fp64 or bf16",
    "parallel.layout=ring": "parallel.layout: 'ring': give line or loop",
    "version=2": "version: 2: give 1",
    "model=": f"model: null: give a mapping whose family is {FAMILIES}",
    "model=llama-1m": f"model: 'llama-1m': give a mapping whose family is {FAMILIES}",
    "model={preset: llama-1m}": f"model.family: missing: give {FAMILIES}",
    "model.family=lama": f"model.family: 'lama': give {FAMILIES}; did you mean llama?",
    "model={family: mlp, widths: [8, 0]}": "model.widths[1]: 0: give a whole number from 1 to 65536",
    "model={family: mlp, activation: swish}": "model.activation: 'swish': give relu, tanh or gelu",
    "model.preset=1": "model.preset: 1: give text, or null",
    "model={family: digits_cnn, preset: x}": "model.preset: 'x': no such key: "
    "it belongs to family: llama, mistral, mixtral, qwen2, qwen3 or qwen3_moe; "
    "with family: digits_cnn here are family, label_smoothing, channels, num_blocks, groups",
    "model={family: mixtral, preset: mixtral-1m, routing: {capacity: 0.001}}": "model.routing.capacity: 0.001: "
    "experts would take 0.51 choices of a microbatch of 1024 tokens, less than one: give at least 0.002",
    "model={family: mixtral, preset: mixtral-1m, routing: {drop: prob}}": "model.routing.drop: 'prob': "
    "give choice_major, token_major or probs; did you mean probs?",
    "model.routing={capacity: 1}": "model.routing: a mapping: no such key: it belongs to family: mixtral or qwen3_moe; "
    "with family: llama here are family, preset, shape, init_from, config",
    **{
        f"model={{family: mixtral, preset: mixtral-1m, routing: {{{routing}}}}}": f"model.routing.{refusal}"
        for routing, refusal in {
            "router: switch": "router: 'switch': give softmax_topk, gshard, sigmoid, xmoe, expert_choice or softmoe",
            "router: expert_choice": f"router: 'expert_choice': {LATER}",
            "router: softmoe, slots: 2": f"router: 'softmoe': {LATER}",
            "router: gshard, allow_lookahead: true": "allow_lookahead: true: "
            "by router: gshard no token sees a later one: leave it out",
            f"{SOFT}, capacity: 1": f"capacity: 1.0: by router: softmoe {EVEN}",
            f"{SOFT}, balance_coefficient: 0.1": f"balance_coefficient: 0.1: by router: softmoe {EVEN}",
            "router: expert_choice, allow_lookahead: true, drop: probs": "drop: 'probs': "
            f"by router: expert_choice {EVEN}",
            "router: sigmoid, temperature: 0.1": "temperature: 0.1: "
            "it belongs to router: xmoe, and this is sigmoid: leave it out",
            "router: sigmoid, noise: 1": "noise: 1.0: "
            "it belongs to router: gshard, and this is sigmoid: leave it out",
            "router: sigmoid, random_second: true": "random_second: true: "
            "it belongs to router: gshard, and this is sigmoid: leave it out",
            "router: gshard, noise: 0": "noise: 0: give a number above 0 and at most 100, or null",
            "slots: 2": "slots: 2: it belongs to router: softmoe, and this is softmax_topk: leave it out",
        }.items()
    },
    "model={family: mixtral, init_from: /x, routing: {router: sigmoid}}": "model.routing.router: 'sigmoid': "
    "transformers has no such router, so neither init_from nor exports have: give softmax_topk for them",
    "model={family: mixtral, init_from: /x, routing: {router: gshard, noise: 1}}": "model.routing.noise: 1.0: "
    "transformers has no noise on scores, so neither init_from nor exports have: leave it out for them",
    "model={family: qwen3_moe, preset: qwen3-moe-30m, routing: {router: gshard, random_second: true}}": ""
    "model.routing.random_second: true: it is the second of two, and num_experts_per_tok is 4: "
    "give 2 of these, or leave it out",
    "model={family: mixtral, shape: {num_experts_per_tok: 9}}": "model.shape.num_experts_per_tok: 9: "
    "there are 8 experts: give at most so many",
    "model.shape.hidden_size=7": "model.shape.hidden_size: 7: give a whole number from 8 to 65536",
    "model.shape.hidden_size=130": "model.shape.hidden_size: 130: "
    "give an even multiple of num_attention_heads (4), or set head_dim",
    "model.shape.num_key_value_heads=3": "model.shape.num_attention_heads: 4: "
    "give a multiple of num_key_value_heads (3)",
    "model.shape.head_dim=7": "model.shape.head_dim: 7: give an even number (rotary embedding)",
    "model.shape.tie_word_embeddings=yes": "model.shape.tie_word_embeddings: 'yes': give true or false",
    "data=/books": "data: '/books': give a mapping with sources",
    "data.sources=/books": f"data.sources: '/books': {SOURCES}",
    "data.sources=[]": f"data.sources: []: {SOURCES}",
    "data.sources=[/books]": f"data.sources[0]: '/books': {FORMATS}",
    "data.sources=[{path: /books}]": "data.sources[0].format: missing: "
    "give arrays, digits, jsonl, parquet, text or tokens",
    "data.sources[0].format=txt": "data.sources[0].format: 'txt': "
    "give arrays, digits, jsonl, parquet, text or tokens; did you mean text?",
    "data.sources=[{format: text}]": "data.sources[0].path: missing: give text",
    "data.sources[0].weight=0": "data.sources[0].weight: 0: give a number above 0",
    "data.sources[0].pth=/x": "data.sources[0].pth: '/x': no such key: did you mean path? "
    "here are format, path, glob, weight",
    "data.validation_ratio=2": "data.validation_ratio: 2: give a number from 0 to 0.5, or null",
    "data.coreset.fraction=0": "data.coreset.fraction: 0: give a number above 0 and at most 1",
    "data.coreset.fraction=1.5": "data.coreset.fraction: 1.5: give a number above 0 and at most 1",
    "data.coreset.method=crag": "data.coreset.method: 'crag': give none, craig or random; did you mean craig?",
    "data.coreset.refresh_epochs=5": "data.coreset.refresh_epochs: 5: "
    "none has nothing to choose anew: leave it away, or give method: random or feature: last_layer",
    "data.coreset.max_overhead=0": "data.coreset.max_overhead: 0: give a number above 0 and at most 1000000",
    "data.coreset.feature=hidden": "data.coreset.feature: 'hidden': give last_layer, logits or inputs",
    "data.coreset.method=craig": "data.coreset.method: 'craig': "
    "nothing is measured of it for language models such as llama: give none",
    "data.tokenizer=": "data.tokenizer: null: give text",
    "batch.samples=5": "batch.samples: 5: give a multiple of microbatch_samples (4)",
    "skip.ratio=1": "skip.ratio: 1: give a number of at least 0 and below 1",
    "skip.ratio=0.5": "skip.ratio: 0.5: the first and the last stage cannot be left out: "
    "give 0, or raise parallel.stages",
    "skip.max_swaps=17": "skip.max_swaps: 17: give a whole number from 0 to 16",
    "skip.max_jump=0": "skip.max_jump: 0: give a whole number from 1 to 512, or null",
    "plan.method=best": "plan.method: 'best': give search, balanced or full",
    "plan.budget_s=601": "plan.budget_s: 601: give a number from 0 to 600",
    "plan.backward=half": "plan.backward: 'half': give auto, whole or split",
    "plan.replan_if_off_by=0": "plan.replan_if_off_by: 0: give a number above 0 and at most 1000000",
    "name=3": f"name: 3: {NAME}",
    "name=My Job": f"name: 'My Job': {NAME}",
    "name=": f"name: null: {NAME}",
    "seed=-1": "seed: -1: give a whole number of at least 0 and below 9223372036854775808",
    "checkpoint.url=[x]": "checkpoint.url: ['x']: give text, or null",
    "data.sources[1].path=/x": "--set: 'data.sources[1].path=/x': data.sources is a list of 1 and has no 1",
    "budget.steps.more=1": "--set: 'budget.steps.more=1': budget.steps is a plain value and has no more",
    "budget.steps": "--set: 'budget.steps': give a field and a value, for example budget.steps=500",
    "=3": "--set: '=3': give a field and a value, for example budget.steps=500",
    "budget.steps=[": "--set budget.steps line 1 column 2: '[': while parsing a flow node, expected the node content, "
    f"but found '<stream end>': {SYNTAX}",
}
# A whole file that is none, and what is said about it.
WRONG_TEXTS = {
    "": "job.yaml: nothing: give a mapping of fields to values; `skein job schema` lists a job's",
    "- name: a": "job.yaml: a list: give a mapping of fields to values; `skein job schema` lists a job's",
    "just words": "job.yaml: a plain value: give a mapping of fields to values; `skein job schema` lists a job's",
    "name: a: b": f"job.yaml line 1 column 8: 'name: a: b': mapping values are not allowed here: {SYNTAX}",
    "name: a\n\tmodel: b": "job.yaml line 2 column 1: 'model: b': while scanning for the next token, "
    "found character '\\t' that cannot start any token: indent with spaces, never with tabs",
    "a: {b: 1": "job.yaml line 1 column 9: 'a: {b: 1': while parsing a flow mapping, "
    f"expected ',' or '}}', but got '<stream end>': {SYNTAX}",
    "a: 1\n---\nb: 2": "job.yaml line 2 column 1: '---': expected a single document in the stream, "
    f"but found another document: {SYNTAX}",
    "a: &x 1\nb: *x": "job.yaml line 2 column 4: 'b: *x': aliases are not read: write the value out",
    "a: !!binary aGk=": "job.yaml line 1 column 4: 'a: !!binary aGk=': "
    "no tag tag:yaml.org,2002:binary is read: leave it out",
    "a: !!python/name:os.system x": "job.yaml line 1 column 4: 'a: !!python/name:os.system x': "
    "no tag tag:yaml.org,2002:python/name:os.system is read: leave it out",
    "name: a\nname: b": "name: given twice: keep one: it stands in line 1 and again in line 2",
    "budget:\n  steps: 3\n  steps: 4": "budget.steps: given twice: keep one: it stands in line 2 and again in line 3",
    "a: \x07": "job.yaml: not YAML: unacceptable character #x0007: special characters are not allowed; "
    "write plain UTF-8 text",
    "a: " + "[" * 3000: "job.yaml: not a job: is nested too deeply",
    "a: " + "9" * 5000: "job.yaml: not a job: holds a value that cannot be read: "
    "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits",
    "a" * (MAX_CHARACTERS + 1): f"job.yaml: {MAX_CHARACTERS + 1} characters: is no job file: "
    f"those have at most {MAX_CHARACTERS} characters",
}


def mistakes(text: str, *overrides: str) -> list[str]:
    with pytest.raises(JobFileErrors) as caught:
        parse_job(text, origin="job.yaml", overrides=overrides)
    assert str(caught.value).splitlines() == [str(error) for error in caught.value.errors]
    return [str(error) for error in caught.value.errors]


@pytest.mark.parametrize("change", WRONG_VALUES)
def test_wrong_value_is_one_line_with_field_value_and_cure(change: str) -> None:
    assert mistakes(GOOD, change) == [WRONG_VALUES[change]]


@pytest.mark.parametrize("text", WRONG_TEXTS, ids=lambda text: text[:20])
def test_wrong_file_is_one_line_with_place_and_cure(text: str) -> None:
    assert mistakes(text) == [WRONG_TEXTS[text]]


def test_all_mistakes_are_told_together() -> None:
    assert mistakes("{name: A, budget: {steps: x}, seeed: 1, data: {sources: []}}") == [
        f"name: 'A': {NAME}",
        f"model: missing: give a mapping whose family is {FAMILIES}",
        f"data.sources: []: {SOURCES}",
        f"budget.steps: 'x': {STEPS}",
        f"seeed: 1: no such key: did you mean seed? here are {TOP}",
    ]


def test_long_values_are_cut() -> None:
    assert mistakes(GOOD, "seed=" + "9" * 200)[0].startswith("seed: a huge number: give")
    assert len(mistakes(GOOD, "precision=" + "x" * 5000)[0]) < 200


def test_errors_are_one_users_error_about_the_first_mistake() -> None:
    with pytest.raises(JobFileErrors) as caught:
        parse_job(GOOD, origin="job.yaml", overrides=["seed=-1", "precision=fp8"])
    assert (caught.value.field, caught.value.value) == ("precision", "fp8")
    assert len(caught.value.errors) == 2


def test_good_file_is_the_job_it_says() -> None:
    job = parse_job(GOOD, origin="job.yaml")
    assert isinstance(job.model, LlamaModel)
    assert job.model.preset == "llama-1m"
    assert job.data.sources == (TextSource(path="/books"),)
    assert job.total_steps == 3


def test_plain_words_and_numbers_mean_what_they_look_like() -> None:
    text = "{a: 1e-3, b: 1., c: .5, d: 1_000, e: -2.5E+3, f: 0x1F, g: '5', h: ~, i: , j: no, k: 2024-01-02, l: 1:30}"
    assert parse_document(text, origin="x") == {
        "a": 0.001,
        "b": 1.0,
        "c": 0.5,
        "d": 1000,
        "e": -2500.0,
        "f": 31,
        "g": "5",
        "h": None,
        "i": None,
        "j": "no",
        "k": "2024-01-02",
        "l": "1:30",
    }


def test_overrides_replace_add_and_reach_into_lists() -> None:
    document = parse_document(GOOD, origin="job.yaml")
    changed = apply_overrides(
        document, ["budget.steps=9", "optimizer.betas=[0.8, 0.9]", "data.sources.0.glob=*.py"]
    )
    job = parse_job(json.dumps(changed), origin="x")
    assert job.total_steps == 9
    assert job.optimizer == AdamWSpec(betas=(0.8, 0.9))
    assert job.data.sources == (TextSource(path="/books", glob="*.py"),)
    assert document == parse_document(GOOD, origin="job.yaml")


def test_override_may_hold_an_equals_sign() -> None:
    assert apply_overrides({}, ["checkpoint.url=s3://a?b=c"]) == {"checkpoint": {"url": "s3://a?b=c"}}


def test_job_survives_its_own_canonical_json() -> None:
    job = parse_job(GOOD, origin="job.yaml")
    assert job_from_json(job.canonical_json()) == job


def test_json_that_is_none_is_refused() -> None:
    with pytest.raises(JobFileErrors, match=r"job: not JSON: .*: write plain values"):
        job_from_json("{")


def test_schema_explains_every_field_it_can() -> None:
    schema = job_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(schema))["properties"].keys() == JobSpec.model_fields.keys()
    assert "Global gradient norm" in json.dumps(schema)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deploy/config/examples").glob("*.yaml")), ids=lambda p: p.name
)
def test_examples_are_jobs(path: Path) -> None:
    assert parse_job(path.read_text(), origin=path.name).name == path.stem


def test_equal_jobs_are_one_key() -> None:
    two = [
        ResourcesSpec(labels={"gpu": "h100", "disk": "ssd"}),
        ResourcesSpec(labels={"disk": "ssd", "gpu": "h100"}),
    ]
    assert len({*two, ResourcesSpec()}) == 2
