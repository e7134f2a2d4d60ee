//! What a plan is made of, for people.

use std::fmt;

/// The make-up of a plan; `Display` tells it in a few lines.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// `pages` or `spans`.
    pub kind: &'static str,
    /// Blocks, or spans after merging.
    pub blocks: u64,
    /// Stretches of blocks consecutive on both sides, or spans after merging.
    pub segments: u64,
    /// Planes copied apart from each other, after those that are contiguous on both sides merged.
    pub lanes: u64,
    /// Units that threads can share.
    pub units: u64,
    /// Contiguous copies.
    pub runs: u64,
    /// Bytes copied.
    pub total_bytes: u64,
    /// The smallest contiguous piece of a block.
    pub chunk_bytes: u64,
    /// Pieces in which one block of a lane is copied.
    pub pieces: u64,
    /// Whether neighbouring blocks merge into one copy.
    pub blocks_merge: bool,
    /// Bytes the plan occupies.
    pub memory_bytes: u64,
}

impl Explanation {
    /// Mean bytes of one contiguous copy.
    pub fn mean_run_bytes(&self) -> u64 {
        self.total_bytes / self.runs.max(1)
    }

    /// Why blocks merge into longer copies, or why not.
    pub fn merging(&self) -> String {
        let Self {
            chunk_bytes, pieces, ..
        } = self;
        match (self.blocks_merge, pieces) {
            (true, _) => format!("neighbouring blocks merge: they are contiguous in pieces of {chunk_bytes} bytes"),
            (false, 0 | 1) => format!("blocks of {chunk_bytes} bytes do not merge: something lies between them"),
            (false, _) => format!(
                "a block is copied in {pieces} pieces of {chunk_bytes} bytes: nothing larger is contiguous on both sides"
            ),
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            blocks,
            segments,
            lanes,
            units,
            runs,
            ..
        } = self;
        match *kind {
            "pages" => write!(
                f,
                "pages: {blocks} blocks in {segments} segments x {lanes} lanes, {units} units"
            )?,
            _ => write!(f, "{kind}: {blocks} spans, {units} units")?,
        }
        write!(
            f,
            "\n{runs} copies of {} bytes on average for {} bytes",
            self.mean_run_bytes(),
            self.total_bytes
        )?;
        write!(f, "; the plan takes {} bytes", self.memory_bytes)?;
        if *kind == "pages" {
            write!(f, "\n{}", self.merging())?;
        }
        Ok(())
    }
}
