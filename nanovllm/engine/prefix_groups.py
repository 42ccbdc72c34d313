"""Remembers which sequences of the decode batch share leading blocks."""

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.shared_prefix import PrefixGroup, find_prefix_groups, pays


class PrefixGroups:
    """The groups of the latest decode batch; they stay the same while its sequences do."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager
        # The sequences that groups were looked for last, in the order of their batch, and those.
        self._seq_ids: list[int] = []
        self._groups: list[PrefixGroup] = []

    def of(self, seqs: list[Sequence]) -> list[PrefixGroup]:
        """Returns the groups of a decode batch that shares prefixes, if it pays to use them."""
        manager = self._block_manager
        if not manager.num_shared_reads:
            return []
        num_keys = sum(seq.num_computed_tokens for seq in seqs)
        if not pays(manager.num_shared_reads, manager.block_size, num_keys):
            return []
        seq_ids = [seq.seq_id for seq in seqs]
        if seq_ids != self._seq_ids:
            self._groups = find_prefix_groups(
                [seq.block_table for seq in seqs],
                [seq.num_computed_tokens for seq in seqs],
                manager.block_size,
            )
            self._seq_ids = seq_ids
        num_saved = sum(group.num_saved for group in self._groups)
        return self._groups if pays(num_saved, manager.block_size, num_keys) else []

    def forget(self) -> None:
        """Forgets the groups: a sequence gives its blocks back, and may get others."""
        self._seq_ids, self._groups = [], []
