"""A bar of what is done, for who asks for one."""

from cuseq.runtime.checks import sentence


def shown_by(progress):
    """A function of (parts, pairs of a part, what waits for a part) that yields the parts.

    `progress` is the option of a public function: True shows a bar.
    """
    if not isinstance(progress, bool):
        remedy = "pass one of them"
        raise TypeError(sentence("progress", "True or False", repr(progress), remedy))
    if not progress:
        return lambda parts, pairs, wait=None: parts
    try:
        from tqdm.auto import tqdm
    except ImportError as missing:
        raise ImportError(
            "tqdm: expected tqdm, which draws the bar of progress=True, got none installed;"
            " pip install tqdm"
        ) from missing

    def shown(parts, pairs, wait=lambda: None):
        parts = list(parts)
        with tqdm(total=sum(map(pairs, parts)), unit=" pairs") as bar:
            for part in parts:
                yield part
                wait()
                bar.update(pairs(part))

    return shown
