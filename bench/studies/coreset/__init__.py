"""Parts of data that stand for the whole, beside chance and beside the whole."""
