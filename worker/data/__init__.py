"""The data of a job as this worker reads them: samples by position, and errors a user can act on.

A sample of text is a window over the tokens of one source: sample i holds tokens [i * T, i * T + T] of the source's
documents one after another, the last of them as a label only. Files come in the order of their relative paths. Every
document ends with a separator: byte 0 where tokens are bytes, otherwise the tokenizer's own end-of-text token if it
has one. What is left over at the end makes a last, shorter sample whose missing labels are -100.
"""

from worker.data.dataset import Batch, Dataset, open_dataset

__all__ = ["Batch", "Dataset", "open_dataset"]
