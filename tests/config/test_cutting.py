"""Job files that cut a model, or leave stages out of paths: which ways there are, and what is told of others."""

import re

import pytest

from skein.config.load import parse_job
from tests.config.test_load import GOOD, mistakes


@pytest.mark.parametrize(
    ("skip", "stages", "layout", "samples", "mistake"),
    [
        ("{ratio: 0.7}", 6, "line", 32, "skip.ratio: 0.7: the first and the last stage cannot be left out, "
        "and some stage besides must be used: give at most 0.5"),
        ("{ratio: 0.5}", 6, "line", 32, ""),
        ("{ratio: 0.8}", 6, "loop", 32, "skip.ratio: 0.8: the first stage cannot be left out, "
        "and some stage besides must be used: give at most 0.67"),
        ("{ratio: 0.67}", 6, "loop", 32, ""),
        ("{ratio: 0.5}", 8, "loop", 8, "skip.ratio: 0.5: so few microbatches (2 in a step) leave some stages unused: "
        "give less"),
        ("{ratio: 0.5}", 8, "loop", 12, ""),
        ("{ratio: 0.33, max_jump: 1}", 6, "loop", 32, "skip.max_jump: 1: with 4 of 6 stages the last is not reached: "
        "give at least 2"),
        ("{ratio: 0.33, max_jump: 2, max_swaps: 2}", 6, "loop", 32, ""),
    ],
)  # fmt: skip
def test_a_skip_ratio_must_leave_every_stage_its_use(
    skip: str, stages: int, layout: str, samples: int, mistake: str
) -> None:
    text = f"{GOOD}\nskip: {skip}\nparallel: {{stages: {stages}, layout: {layout}}}\nbatch: {{samples: {samples}}}"
    if mistake:
        assert mistakes(text) == [mistake]
    else:
        parse_job(text, origin="job.yaml")


@pytest.mark.parametrize(
    ("more", "split", "mistake"),
    [
        ("parallel: {stages: 4, layout: loop", "output", "in layout loop labels stay where samples are read"),
        ("skip: {ratio: 0.5}\nparallel: {stages: 4", "both", "cannot be left out or change places"),
        ("optimizer: {name: lamb}\nparallel: {stages: 2", "output", "lamb goes by the norm of whole tensors"),
        (
            "aggregation: {rule: diloco}\nparallel: {stages: 2",
            "output",
            "with diloco a walker holds each stage",
        ),
    ],
)
def test_a_vocabulary_is_not_cut_where_that_cannot_be(more: str, split: str, mistake: str) -> None:
    (told,) = mistakes(f"{GOOD}\n{more}, vocabulary: {{split: {split}}}}}")
    assert told.startswith(f"parallel.vocabulary.split: {split!r}: ")
    assert mistake in told


_HEADS = (
    "num_attention_heads (4), num_key_value_heads (2), intermediate_size (704) divide into 1, 2: "
    "give one of these, or auto"
)
_ALONE = "(1), intermediate_size (704) divide into 1 alone, so blocks are computed on one device"
_ONE = "computed on one device: give 1, or auto"


@pytest.mark.parametrize(
    ("model", "parallel", "mistake"),
    [
        ("preset: mixtral-1m", "{}", ""),
        ("shape: {num_key_value_heads: 1}", "{}", "num_key_value_heads (1), with one of 8 experts for each"),
        (
            "shape: {num_local_experts: 1, num_experts_per_tok: 1}",
            "{}",
            "divide into 1 alone, so blocks are computed on one device: give stage",
        ),
        (
            "preset: mixtral-1m",
            "{tensor: {size: 1}}",
            "leaves all on one device: give stage, or a larger size",
        ),
    ],
)
def test_experts_go_over_a_mesh_where_they_divide(model: str, parallel: str, mistake: str) -> None:
    given = f"model: {{family: mixtral, placement: mesh, {model}}}"
    text = f"{re.sub('model:.*', given, GOOD)}\nparallel: {parallel}"
    if mistake:
        (told,) = mistakes(text)
        assert told.startswith("model.placement: 'mesh': ")
        assert mistake in told
    else:
        parse_job(text, origin="job.yaml")


@pytest.mark.parametrize(
    ("model", "size", "mistake"),
    [
        ("{family: llama, shape: {num_key_value_heads: 2, intermediate_size: 704}}", "2", ""),
        ("{family: llama, shape: {num_key_value_heads: 2, intermediate_size: 704}}", "auto", ""),
        ("{family: llama, shape: {num_key_value_heads: 2, intermediate_size: 704}}", "4", _HEADS),
        (
            "{family: llama, shape: {num_key_value_heads: 1, intermediate_size: 704}}",
            "2",
            f"{_ALONE}: give 1, or auto",
        ),
        ("{family: mixtral, preset: mixtral-1m}", "2", f"{_ONE}, or model.placement: mesh"),
        ("{family: mixtral, preset: mixtral-1m, placement: mesh}", "2", ""),
        ("{family: mixtral, preset: mixtral-1m}", "1", ""),
    ],
)
def test_devices_share_blocks_that_divide_among_them(model: str, size: str, mistake: str) -> None:
    text = f"{re.sub('model:.*', f'model: {model}', GOOD)}\nparallel: {{tensor: {{size: {size}}}}}"
    if mistake:
        (told,) = mistakes(text)
        assert told.startswith(f"parallel.tensor.size: {size}: ")
        assert told.endswith(mistake)
    else:
        parse_job(text, origin="job.yaml")


SQUARE = "{num_attention_heads: 4, num_key_value_heads: 4, intermediate_size: 704, hidden_size: 256}"


@pytest.mark.parametrize(
    ("model", "tensor", "mistake"),
    [
        (f"{{family: llama, shape: {SQUARE}}}", "{form: 2d}", ""),
        (f"{{family: llama, shape: {SQUARE}}}", "{form: 2d, size: 4}", ""),
        (f"{{family: llama, shape: {SQUARE}}}", "{form: auto, size: 4}", ""),
        (
            f"{{family: llama, shape: {SQUARE}}}",
            "{form: 2d, size: 6}",
            "parallel.tensor.size: 6: form 2d takes a square: give 4, 9, 16, or auto",
        ),
        (
            f"{{family: llama, shape: {SQUARE}}}",
            "{form: 2d, size: 1}",
            "parallel.tensor.size: 1: form 2d takes a square: give 4, 9, 16, or auto",
        ),
        (
            f"{{family: llama, shape: {SQUARE}}}",
            "{form: 2d, size: 9}",
            "parallel.tensor.form: '2d': 3 x 3 devices do not divide num_attention_heads (4), num_key_value_heads (4), "
            "intermediate_size (704), hidden_size (256), batch.microbatch_samples (4): "
            "change these, or give another size, or 1d",
        ),
        (
            "{family: llama, shape: {num_key_value_heads: 1}}",
            "{form: 2d}",
            "parallel.tensor.form: '2d': 2 x 2 devices do not divide num_key_value_heads (1): "
            "change these, or give another size, or 1d",
        ),
        (
            f"{{family: llama, shape: {SQUARE}}}",
            "{form: 2d, sequence_parallel: true}",
            "parallel.tensor.sequence_parallel: true: in form 2d samples and features are in blocks: "
            "give auto, or false",
        ),
        (
            "{family: mixtral, preset: mixtral-1m}",
            "{form: 2d}",
            "parallel.tensor.form: '2d': experts take tokens with all features, and in blocks no device has these: "
            "give auto, or 1d",
        ),
    ],
)
def test_squares_of_devices_share_what_they_divide(model: str, tensor: str, mistake: str) -> None:
    text = f"{re.sub('model:.*', f'model: {model}', GOOD)}\nparallel: {{tensor: {tensor}}}"
    if mistake:
        assert mistakes(text) == [mistake]
    else:
        parse_job(text, origin="job.yaml")


def test_shards_of_a_vocabulary_are_not_in_blocks() -> None:
    text = re.sub("model:.*", f"model: {{family: llama, shape: {SQUARE}}}", GOOD)
    assert mistakes(f"{text}\nparallel: {{tensor: {{form: 2d}}, vocabulary: {{split: output}}}}") == [
        "parallel.tensor.form: '2d': shards of the vocabulary are whole on each device: "
        "give 1d, or parallel.vocabulary.split: off"
    ]


def test_sequences_are_in_parts_only_where_devices_share_blocks() -> None:
    text = re.sub("model:.*", "model: {family: mixtral, preset: mixtral-1m}", GOOD)
    tensor = "parallel: {tensor: {sequence_parallel: %s}}"
    assert mistakes(f"{text}\n{tensor % 'true'}") == [
        "parallel.tensor.sequence_parallel: true: blocks of family mixtral are computed on one device: "
        "give auto, or false, or model.placement: mesh"
    ]
    spread = text.replace("mixtral-1m", "mixtral-1m, placement: mesh")
    parse_job(f"{spread}\n{tensor % 'true'}", origin="job.yaml")
    parse_job(f"{text}\n{tensor % 'auto'}", origin="job.yaml")


@pytest.mark.parametrize("given", ["0", "9", "many", "1.5", "null"])
def test_a_field_of_several_types_is_refused_in_one_line(given: str) -> None:
    shown = given if given in ("0", "9", "1.5", "null") else f"'{given}'"
    assert mistakes(f"{GOOD}\nparallel: {{stages: 4, chunks: {given}}}") == [
        f"parallel.chunks: {shown}: give a whole number from 1 to 8 or auto"
    ]


def test_chunks_neither_skip_nor_make_walkers() -> None:
    skipping = f"{GOOD}\nskip: {{ratio: 0.5}}\nparallel: {{stages: 4, chunks: 2}}"
    assert mistakes(skipping) == [
        "parallel.chunks: 2: with skip.ratio 0.5 microbatches leave out stages, not parts of them: give 1"
    ]
    walking = f"{GOOD}\naggregation: {{rule: diloco}}\nparallel: {{stages: 2, replicas: 2, chunks: 2}}"
    assert mistakes(walking) == [
        "parallel.chunks: 2: with diloco a walker holds each stage once, on workers of its own: give 1"
    ]


@pytest.mark.parametrize(
    ("stages", "layout", "ratio", "num_visited"),
    [
        (6, "loop", 0.33, 4),
        (6, "line", 0.33, 4),
        (4, "line", 0.25, 3),
        (4, "loop", 0.5, 2),
        (1, "line", 0, 1),
    ],
)
def test_a_skip_ratio_is_rounded_to_whole_stages(
    stages: int, layout: str, ratio: float, num_visited: int
) -> None:
    text = f"{GOOD}\nskip: {{ratio: {ratio}}}\nparallel: {{stages: {stages}, layout: {layout}}}"
    assert parse_job(text, origin="job.yaml").num_visited_stages == num_visited


def test_a_family_whose_backwards_cannot_be_split_says_so() -> None:
    split = ("plan={backward: split, method: balanced}", "parallel.stages=3")
    assert parse_job(GOOD, origin="job.yaml", overrides=split).plan.splits
    digits = ("model={family: digits_cnn}", "data.sources=[{format: digits}]")
    assert mistakes(GOOD, *split, *digits) == [
        "plan.backward: 'split': models of family digits_cnn have whole backwards only: give whole"
    ]
