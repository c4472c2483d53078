"""Memory that each device of a mesh needs for a stage, and bytes that come to it, by form; and which form is taken.

Activations are those that autograd keeps from forward to backward, each tensor once, as of `skein.model.layers`; what
comes to a device is counted at the least that any algorithm of its collectives needs.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, Section 4.2, with what
our functions keep in place of its table.
"""

import math
from dataclasses import dataclass

from skein.config.job import JobSpec
from skein.config.mesh.tensor import MeshForm
from skein.model.decoder import NUM_SCORES, OVER_VOCABULARY, DecoderModel, decoder_shape
from skein.model.layers import LABEL_BYTES, Shapes, layers_of
from skein.model.rows import VocabularySplit
from skein.types import StageSpec

_DEVICE_COPIES = 2
"""Copies of each parameter on a device: itself and its gradient; the rest is the worker's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """Load of one device that shares a stage: bytes of memory, alone and of each microbatch in flight, and of traffic.

    `received_bytes` come from other devices for a microbatch, there and back.
    """

    fixed_bytes: int
    slot_bytes: int
    received_bytes: int

    def memory_bytes(self, slots: int) -> int:
        """Bytes that the stage takes with so many microbatches in flight."""
        return self.fixed_bytes + slots * self.slot_bytes


def device_load(job: JobSpec, stage: StageSpec, form: MeshForm) -> DeviceLoad:
    """Load of the device that has most of a stage; of a family that is not shared, all of it.

    Of experts that are spread it is about that; what is exchanged for them is not counted.
    """
    model, word = form.share_of(job.model), job.precision.word_bytes
    samples = -(-job.batch.microbatch_samples // form.side)
    tokens = job.data.sequence_tokens
    costs = layers_of(model, sequence_tokens=tokens, precision=job.precision)[stage.first : stage.stop]
    layers = model.layer_parameters()[stage.first : stage.stop]
    held = {name: sizes for layer in layers for name, sizes in layer.items()}
    kept_bytes = sum(x.activation_bytes for x in costs) + costs[-1].output_bytes
    received_bytes = 0
    if isinstance(model, DecoderModel) and form.size > 1:
        ends = _Ends(job=job, model=model, stage=stage, form=form)
        of_layers = sum(x.activation_bytes for x in costs[: len(costs) - ends.has_head]) // tokens
        tokens = form.padded_tokens(tokens)
        kept_bytes = tokens * (of_layers + ends.kept_bytes)
        traffic = _GridTraffic(ends=ends, num_tokens=samples * tokens) if form.is_grid else None
        received_bytes = samples * tokens * ends.received_bytes if traffic is None else traffic.received_bytes
    return DeviceLoad(
        fixed_bytes=_DEVICE_COPIES * word * _num_held(held, form, model.num_experts),
        slot_bytes=samples * kept_bytes,
        received_bytes=received_bytes,
    )


def chosen_form(
    job: JobSpec, stage: StageSpec, *, num_devices: int, slots: int, memory_bytes: int
) -> MeshForm:
    """Form in which so many devices, with so much memory each, share a stage.

    Of those that fit the one that carries least, and of those alike the first of `TensorSpec.forms_on`; blocks only
    where no other form fits. Where none does, the one that needs least memory.
    """
    samples = job.batch.microbatch_samples
    forms = list(job.parallel.tensor.forms_on(num_devices, job.model, samples))
    loads = {form: device_load(job, stage, form) for form in forms}
    fitting = [form for form in forms if loads[form].memory_bytes(slots) <= memory_bytes]
    if fitting:
        return min(fitting, key=lambda form: (form.is_grid, loads[form].received_bytes))
    return min(forms, key=lambda form: loads[form].memory_bytes(slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Cost of a stage of a decoder on several devices beyond its layers' functions; bytes of a token."""

    job: JobSpec
    model: DecoderModel
    stage: StageSpec
    form: MeshForm

    @property
    def num_blocks(self) -> int:
        return self.model.num_blocks_in(self.stage)

    @property
    def has_head(self) -> bool:
        """Whether each device has some rows of a whole head."""
        is_whole = self.model.vocabulary_split is VocabularySplit.OFF
        return is_whole and self.stage.stop > self.model.inner_layers.stop

    @property
    def has_rows(self) -> bool:
        """Whether each device has some rows of a whole embedding."""
        return self.stage.first == 0 and self.model.vocabulary_split is not VocabularySplit.BOTH

    @property
    def num_rows(self) -> int:
        """Rows of the vocabulary that a device has at most."""
        return -(-self.model.vocab_size // (self.form.side if self.form.is_grid else self.form.size))

    @property
    def kept_bytes(self) -> int:
        """Bytes of the head, or of the output; less what other devices have of norms' inputs and scales."""
        hidden, word, size = (
            decoder_shape(self.model).hidden_size,
            self.job.precision.word_bytes,
            self.form.size,
        )
        row = (hidden + 1) * word
        num_norms = 2 * self.num_blocks + self.has_head
        spared = math.ceil(row * num_norms * (size - 1) / size) if self.form.in_sequence else 0
        spared += self.num_blocks * self._spared_by_experts
        if not self.has_head:
            return hidden * word // (size if self.form.in_sequence else 1) - spared
        if self.form.is_grid:
            # Logits of a block; its scores, those of the row with their normaliser, labels and a mask.
            logits = self.num_rows * word + (NUM_SCORES + NUM_SCORES * self.form.side + 1) * word
            return row + hidden * self.job.precision.product_bytes + logits + LABEL_BYTES + 1
        # The norm's result in the dtype of sums; own scores, those of all with their normaliser, labels and a mask.
        return row + hidden * word + (NUM_SCORES + NUM_SCORES * size + 1) * word + LABEL_BYTES + 1 - spared

    @property
    def _spared_by_experts(self) -> int:
        """Bytes of a block's rows that are other devices', and of tokens that these score, if they are in parts."""
        experts, precision, size = self.model.experts, self.job.precision, self.form.size
        if experts is None:
            return 0
        if experts.mixes_tokens:
            return experts.mixing_bytes(precision) * (size - 1) // (size * self.job.data.sequence_tokens)
        scored = self.form.in_sequence * experts.num_features * precision.product_bytes
        return experts.spared_bytes(precision, size) + scored * (size - 1) // size

    @property
    def received_bytes(self) -> int:
        """There and back: sums are of words, what is gathered for products is of their dtype."""
        hidden, size, precision = decoder_shape(self.model).hidden_size, self.form.size, self.job.precision
        word, product = precision.word_bytes, precision.product_bytes
        summed = hidden * (2 * (word + product) if self.form.in_sequence else 4 * word)
        numbers = self.num_blocks * (summed + self._fed_bytes(summed))
        numbers += 2 * hidden * word * (self.has_rows + self.has_head)
        scores = self.has_head * 2 * word * NUM_SCORES * size
        return (numbers + scores) * (size - 1) // size

    def _fed_bytes(self, summed: int) -> int:
        """Bytes of a block's second half, if all devices' parts were gathered once: a feed-forward is `summed`.

        What experts give is gathered, and their inputs' gradients; of tokens in parts the scores alone. Of experts that
        take means of tokens what they give is summed.
        """
        experts, precision = self.model.experts, self.job.precision
        if experts is None or experts.mixes_tokens:
            return summed
        if self.form.in_sequence:
            return experts.num_scores * precision.word_bytes
        return experts.num_features * (precision.word_bytes + precision.product_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GridTraffic:
    """Bytes that come to a device of a square, there and back; what it sends to be reduced elsewhere counts alike.

    Of each product a device gets all but one block of both operands, and going back twice one of them and reduces the
    other: (q - 1) / q**2 of the whole matrices each. Source: Xu et al., Optimus, 2021, Section 3.2, with the elements
    that arrive in place of those of a tree of messages.
    """

    ends: _Ends
    num_tokens: int

    @property
    def received_bytes(self) -> int:
        others = self.ends.form.side - 1
        num_norms = 2 * self.ends.num_blocks + self.ends.has_head
        # Two sums over a row each, of a number of each token.
        norms = num_norms * 2 * (2 * self.num_tokens * others // self.ends.form.side) * self._word
        return self.ends.num_blocks * others * self._block_bytes + norms + self._vocabulary_bytes

    @property
    def _word(self) -> int:
        return self.ends.job.precision.word_bytes

    @property
    def _product(self) -> int:
        return self.ends.job.precision.product_bytes

    @property
    def _block_bytes(self) -> int:
        shape = decoder_shape(self.ends.model)
        hidden, wide, keys, inner = (
            shape.hidden_size,
            shape.attention_width,
            shape.key_width,
            shape.intermediate_size,
        )
        # Products that share an input: features of that, and of what each makes of it.
        inputs = (
            (hidden, (wide, keys, keys)),
            (wide, (hidden,)),
            (hidden, (inner, inner)),
            (inner, (hidden,)),
        )
        num_bytes = 0
        for num_taken, made in inputs:
            taken, matrices = self.num_tokens * num_taken, sum(made) * num_taken
            # There; gradients of the input; those of the matrices.
            num_bytes += (taken + matrices) * self._product
            num_bytes += matrices * self._product + taken * self._word
            num_bytes += len(made) * taken * self._product + matrices * self._word
        return num_bytes

    @property
    def _vocabulary_bytes(self) -> int:
        side, tokens, rows = self.ends.form.side, self.num_tokens, self.ends.num_rows
        matrix = rows * decoder_shape(self.ends.model).hidden_size
        lookup = self.ends.has_rows * (side - 1) * 2 * matrix * self._word
        if not self.ends.has_head:
            return lookup
        logits = tokens * rows
        head = (2 * logits + 2 * matrix) * self._product + (logits + matrix) * self._word
        scores = 2 * (NUM_SCORES * side * tokens) * (side - 1) // side * self._word
        return lookup + (side - 1) * head + scores


def _num_held(held: Shapes, form: MeshForm, num_experts: int) -> int:
    """Numbers in all parameters of a device; the vocabulary is cut by rows, experts are whole on one device each."""
    num_held, num_cuts = 0, form.side if form.is_grid else form.size
    for name, sizes in held.items():
        num = math.prod(sizes)
        if name in OVER_VOCABULARY:
            num = -(-sizes[0] // num_cuts) * math.prod(sizes[1:])
        elif ".experts." in name:
            num = num * -(-num_experts // form.size) // num_experts
        num_held += num
    return num_held
