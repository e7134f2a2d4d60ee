//! The entry points of the kernels, by what they do.

/// Moves with the structs of `cuda/view.cuh`, and is a part of every kernel's name, there as here.
pub(super) const ABI: u32 = 2;
/// Threads of a block of the kernels that load and store.
const BLOCK: u32 = 256;
/// Bytes that a warp moves with one instruction.
const WARP_BYTES: u32 = 512;

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Entry {
    /// A warp copies a tile of `unroll` times 512 bytes.
    Tiles {
        /// Vectors that a thread has under way: 1, 2, 4 or 8.
        unroll: u32,
        /// Whether it adds up checksums.
        sums: bool,
    },
    /// A thread copies vectors of `width` bytes.
    Vectors {
        /// Bytes of a vector: 1, 2, 4, 8 or 16.
        width: u32,
        /// Whether it adds up checksums.
        sums: bool,
    },
    /// The bulk engine copies tiles by way of shared memory; from sm_90 on.
    Bulk {
        /// Whether it adds up checksums.
        sums: bool,
    },
    /// A thread reads vectors of `width` bytes at the destination and adds up checksums; nothing is copied.
    ReadBack {
        /// Bytes of a vector, as of [`Entry::Vectors`].
        width: u32,
    },
}

impl Entry {
    /// Vectors that [`Entry::Tiles`] comes with, most first.
    pub const UNROLLS: [u32; 4] = [8, 4, 2, 1];
    /// Widths that [`Entry::Vectors`] comes with, widest first.
    pub const WIDTHS: [u32; 5] = [16, 8, 4, 2, 1];

    /// Every entry point that a device of compute capability `major` has.
    pub fn all(major: u32) -> Vec<Self> {
        let mut all = Vec::new();
        for sums in [false, true] {
            all.extend(Self::UNROLLS.map(|unroll| Self::Tiles { unroll, sums }));
            all.extend(Self::WIDTHS.map(|width| Self::Vectors { width, sums }));
            if major >= 9 {
                all.push(Self::Bulk { sums });
            }
        }
        all.extend(Self::WIDTHS.map(|width| Self::ReadBack { width }));
        all
    }

    /// The name in the module.
    pub fn name(self) -> String {
        let (stem, sums) = match self {
            Self::Tiles { unroll, sums } => (format!("pdkv{ABI}_copy_tiles_{unroll}"), sums),
            Self::Vectors { width, sums } => (format!("pdkv{ABI}_copy_vectors_{width}"), sums),
            Self::Bulk { sums } => (format!("pdkv{ABI}_copy_bulk"), sums),
            Self::ReadBack { width } => (format!("pdkv{ABI}_read_back_{width}"), false),
        };
        if sums { stem + "_sums" } else { stem }
    }

    /// Threads of a block.
    pub fn block(self) -> u32 {
        match self {
            Self::Bulk { .. } => 32,
            _ => BLOCK,
        }
    }

    /// Blocks that a multiprocessor is given at a time; the kernels' launch bounds see to it that they fit.
    pub fn resident(self) -> u32 {
        match self {
            Self::Tiles { unroll: 1 | 2, .. } => 6,
            Self::Tiles { unroll: 4, .. } | Self::Bulk { .. } => 4,
            Self::Tiles { .. } | Self::Vectors { .. } | Self::ReadBack { .. } => 3,
        }
    }

    /// Items that a block takes in one round.
    pub(super) fn round(self) -> u32 {
        match self {
            Self::Tiles { .. } => BLOCK / 32,
            Self::Vectors { .. } | Self::ReadBack { .. } => BLOCK * 4,
            Self::Bulk { .. } => 1,
        }
    }

    /// The kernel of whole tiles for pieces of `chunk_bytes`, if one leaves few threads idle: the last tile of a piece may be short.
    pub(super) fn tiles_for(chunk_bytes: u64, sums: bool) -> Option<(Self, u32)> {
        let idle = |unroll: &u32| {
            let tile = u64::from(unroll * WARP_BYTES);
            (chunk_bytes.div_ceil(tile) * tile).saturating_sub(chunk_bytes)
        };
        let unroll = Self::UNROLLS
            .into_iter()
            .find(|unroll| idle(unroll) <= chunk_bytes / 8)
            .or_else(|| Some(1).filter(|unroll| idle(unroll) <= chunk_bytes / 4))?;
        Some((Self::Tiles { unroll, sums }, unroll * WARP_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_waste_few_threads() {
        let unroll = |chunk| match Entry::tiles_for(chunk, false) {
            Some((Entry::Tiles { unroll, .. }, bytes)) => Some((unroll, bytes)),
            _ => None,
        };
        assert_eq!(unroll(4096), Some((8, 4096)));
        assert_eq!(unroll(1 << 20), Some((8, 4096)));
        assert_eq!(unroll(2048), Some((4, 2048)));
        assert_eq!(unroll(5 << 10), Some((2, 1024)));
        assert_eq!(unroll(512), Some((1, 512)));
        // A head of 576 values of two bytes: a third of the threads would idle.
        assert_eq!(unroll(1152), None);
        assert_eq!(unroll(256), None);
        assert_eq!(unroll(16), None);
    }

    #[test]
    fn names_are_distinct() {
        let mut names: Vec<_> = Entry::all(9).into_iter().map(Entry::name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 25);
        assert_eq!(Entry::all(8).len(), 23);
    }
}
