//! Model memory: one word per (layer, block), and who may write the block now.

use pdkv_core::id::{ExportId, TransferId};

use super::rng::mix;

/// Who holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pin {
    Export(ExportId),
    Transfer(TransferId),
}

#[derive(Debug)]
pub(super) struct Memory {
    words: Vec<u64>,
    pins: Vec<Option<Pin>>,
    blocks: u32,
    scribbles: u64,
}

impl Memory {
    pub(super) fn new(blocks: u32, layers: u32) -> Self {
        Self {
            words: vec![0; (blocks * layers) as usize],
            pins: vec![None; blocks as usize],
            blocks,
            scribbles: 0,
        }
    }

    /// Takes the first free blocks that `offset` leads to; `None` when there are not enough.
    pub(super) fn allocate(&mut self, count: u32, offset: u64, pin: Pin) -> Option<Vec<u32>> {
        let order = (0..self.blocks).map(|b| (b + offset as u32 % self.blocks) % self.blocks);
        let free: Vec<u32> = order
            .filter(|&b| self.pins[b as usize].is_none())
            .take(count as usize)
            .collect();
        if free.len() < count as usize {
            return None;
        }
        for &block in &free {
            self.pins[block as usize] = Some(pin);
        }
        Some(free)
    }

    /// Names the true holder of blocks that were taken before it had a name.
    pub(super) fn repin(&mut self, blocks: &[u32], pin: Pin) {
        for &block in blocks {
            self.pins[block as usize] = Some(pin);
        }
    }

    /// Gives blocks back and overwrites them, as the next request would.
    pub(super) fn free(&mut self, blocks: &[u32]) {
        for &block in blocks {
            self.pins[block as usize] = None;
            for index in (block as usize..self.words.len()).step_by(self.blocks as usize) {
                self.scribbles += 1;
                self.words[index] = mix(self.scribbles ^ 0xdead_beef_0000);
            }
        }
    }

    pub(super) fn in_use(&self) -> usize {
        self.pins.iter().flatten().count()
    }

    fn index(&self, layer: u32, block: u32) -> usize {
        (layer * self.blocks + block) as usize
    }

    pub(super) fn read(&self, layer: u32, block: u32) -> u64 {
        self.words[self.index(layer, block)]
    }

    /// A mover's write: `false` when the block is not `pin`'s any more.
    #[must_use]
    pub(super) fn write(&mut self, layer: u32, block: u32, value: u64, pin: Pin) -> bool {
        let index = self.index(layer, block);
        self.words[index] = value;
        self.pins[block as usize] == Some(pin)
    }

    /// Writes the words of an export's blocks, in logical order from `first`.
    pub(super) fn fill(&mut self, layers: u32, blocks: &[u32], first: u32, export: ExportId) {
        for layer in 0..layers {
            for (position, &block) in (first..).zip(blocks) {
                let index = self.index(layer, block);
                self.words[index] = word(export, layer, position);
            }
        }
    }

    /// The first (layer, position) whose word is not the export's.
    pub(super) fn wrong(
        &self,
        layers: core::ops::Range<u32>,
        blocks: &[u32],
        first: u32,
        export: ExportId,
    ) -> Option<(u32, u32)> {
        for layer in layers {
            for (position, &block) in (first..).zip(blocks) {
                if self.read(layer, block) != word(export, layer, position) {
                    return Some((layer, position));
                }
            }
        }
        None
    }
}

/// The word that names its source.
fn word(export: ExportId, layer: u32, position: u32) -> u64 {
    let (low, high) = export.as_bytes().split_at(8);
    let half = |bytes: &[u8]| bytes.iter().fold(0u64, |sum, &b| sum << 8 | u64::from(b));
    mix(half(low) ^ mix(half(high) ^ mix(u64::from(layer) << 32 | u64::from(position))))
}
