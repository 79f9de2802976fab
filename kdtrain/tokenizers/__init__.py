"""A teacher with another tokenizer: common boundaries, cells of both vocabularies, and views of caches."""
