"""
Tokens that hold the end of a tag and more.

A grammar begins behind the tag that ends the thinking. Where that is no token of its
own, a model may write its last letter and the first one of its answer as one token
(`>{`), of which the grammar would see nothing. These tokens are not let in there.
"""

from collections.abc import Mapping, Sequence

from llguidance import LLTokenizer

# By what is left of the tag, in small letters; nothing where there are none.
TokensBeyond = Mapping[str, Sequence[int]]


def tokens_beyond(tag: str, tokenizer: LLTokenizer) -> TokensBeyond:
    """
    Look through a vocabulary; it takes about a microsecond a token.

    Args:
        tag: in letters of any case.
    """
    whole = tag.lower()
    rests = [whole[at:] for at in range(1, len(whole))]
    found: dict[str, list[int]] = {}
    for token in range(tokenizer.vocab_size):
        said = tokenizer.decode_bytes([token]).decode(errors="replace").lower()
        begins = [rest for rest in rests if said.startswith(rest) and said != rest]
        if whole in said and not said.endswith(whole):
            begins.append(whole)
        for rest in begins:
            found.setdefault(rest, []).append(token)
    return found
