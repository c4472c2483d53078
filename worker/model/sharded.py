"""Decoder stages of a model whose vocabulary is cut into rows, with Hugging Face's parameter names.

B batch, T tokens, H hidden features.
"""

import torch
from torch import Tensor, nn

from skein.model.decoder import DecoderModel, decoder_shape
from skein.model.rows import VocabularySplit, row_blocks
from skein.types import Precision, StageSpec
from worker.mesh.share import WHOLE, Share
from worker.model.base import IGNORED_LABEL, Crossing, Stage, parameter_dtype, product_dtype
from worker.model.decoder import Block, Embedding, Norm, decoder_initial, tables_of
from worker.model.vocabulary import Rows, cross_entropy


class _Held(nn.Module):
    """Holds what Hugging Face names `model.*`, as far as a stage has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens: Embedding | Rows | None = None
        self.layers = nn.ModuleDict()
        self.norm: Norm | None = None


class ShardedDecoderStage(Stage):
    """Layers: the embedding or blocks of its rows, one per decoder block, the final norm, blocks of the head's rows."""

    def __init__(
        self,
        model: DecoderModel,
        stage: StageSpec,
        *,
        sequence_tokens: int,
        precision: Precision,
        share: Share = WHOLE,
    ) -> None:
        shape, inner = decoder_shape(model), model.inner_layers
        blocks = row_blocks(shape.vocab_size)
        super().__init__(model, stage, num_layers=inner.stop + 1 + len(blocks), precision=precision)
        dtype = parameter_dtype(precision)
        self.shape = shape
        self._share = share
        self.model = _Held()
        self.lm_head: Rows | None = None
        self._takes_samples = stage.first == 0
        self._inner = inner
        inputs = self._inputs(blocks, dtype, share)
        self.model.embed_tokens = inputs
        for layer in range(max(stage.first, inner.start), min(stage.stop, inner.stop)):
            self.model.layers[str(layer - inner.start)] = Block(
                model, precision, self.tray, self.junction, share
            )
        if stage.first <= inner.stop < stage.stop:
            self.model.norm = Norm(shape.hidden_size, shape, precision, self.tray)
        held = blocks[max(0, stage.first - inner.stop - 1) : max(0, stage.stop - inner.stop - 1)]
        self._embeds, self._scores = inputs is not None, bool(held)
        if held and not shape.tie_word_embeddings:
            self.lm_head = Rows(held, shape.hidden_size, dtype, self.tray)
        elif held and inputs is None:
            self.model.embed_tokens = Rows(held, shape.hidden_size, dtype, self.tray)
        cos, sin = tables_of(shape, sequence_tokens, dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _inputs(self, blocks: tuple[range, ...], dtype: torch.dtype, share: Share) -> Embedding | Rows | None:
        """The part of the embedding that is here."""
        assert isinstance(self.spec, DecoderModel)
        num_features, first_inner = self.shape.hidden_size, self.spec.inner_layers.start
        if self.spec.vocabulary_split is VocabularySplit.BOTH:
            held = blocks[self.stage.first : min(self.stage.stop, first_inner)]
            return Rows(held, num_features, dtype, self.tray) if held else None
        if self.stage.first > 0:
            return None
        if self.shape.tie_word_embeddings:
            return Rows(blocks, num_features, dtype, self.tray)
        return Embedding(self.shape, dtype, self.tray, share)

    @property
    def _rows(self) -> Rows:
        """Rows of the output matrix."""
        rows = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert isinstance(rows, Rows), "this stage has no rows of the head"
        return rows

    @property
    def takes_labels(self) -> bool:
        return self._scores

    @property
    def takes_tokens(self) -> bool:
        return 0 < self.stage.first < self._inner.start

    @property
    def takes_scores(self) -> bool:
        return self.stage.first > self._inner.stop + 1

    def body(self, x: Tensor) -> Tensor:
        tokens = x if self._takes_samples else None
        return self._through(Crossing(x, tokens)).hidden

    def head(self, x: Tensor) -> Tensor:
        return self._rows.logits(x, product_dtype(self.precision))

    def onward(self, given: Crossing, labels: Tensor | None) -> Crossing:
        with self.autocast(given.hidden):
            passed = self._through(given)
            if not self._scores:
                return passed
            assert labels is not None, "rows are scored without labels"
            hidden = self._share.joined(passed.hidden)
            x, scores = self._rows.score(hidden, passed.scores, labels, product_dtype(self.precision))
            return Crossing(self._share.parts(x), scores=scores)

    def score(self, given: Crossing, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, int]:
        assert weights is None, "samples of text count alike"
        scores = self.onward(given, labels).scores
        assert scores is not None
        return cross_entropy(scores, labels), int((labels != IGNORED_LABEL).sum())

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, int]:
        return self.score(Crossing(x), labels, weights)

    def _through(self, given: Crossing) -> Crossing:
        """Layers of this stage but rows of the head."""
        x, tokens = given.hidden, given.tokens
        if self._takes_samples:
            tokens = x
        rows = self.model.embed_tokens
        if self._embeds and isinstance(rows, Embedding):
            x = rows(tokens)
        elif self._embeds and isinstance(rows, Rows):
            assert tokens is not None, "rows are looked up without tokens"
            if self._takes_samples:
                x = rows.weights[0].new_zeros((*tokens.shape, self.shape.hidden_size))
            else:
                x = self._share.joined(x)
            x = self._share.parts(rows.embed(x, tokens))
        if self.model.layers:
            num_tokens = x.shape[1] * self._share.num_parts
            cos, sin = self.get_buffer("cos")[:num_tokens], self.get_buffer("sin")[:num_tokens]
            for block in self.model.layers.values():
                x = block(x, cos, sin)
        if self.model.norm is not None:
            # Shards add to its gradient, in the dtype of sums.
            x = self.model.norm(x).to(parameter_dtype(self.precision))
        return Crossing(x, tokens if self.stage.stop < self._inner.start else None, given.scores)

    def initial(self, name: str, shape: torch.Size) -> tuple[float, float]:
        return decoder_initial(self.shape, name)
