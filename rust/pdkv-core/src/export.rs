//! Pinned blocks and who may have them: consumer slots, coverage of offers, the reasons an export
//! ends for. Pure bookkeeping; messages and timers are `node`'s.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{CacheId, ExportId, Incarnation, PeerKey, TransferId};
use crate::reference::ExportKind;

/// What an owner exports or offers.
#[derive(Clone, Debug)]
pub struct ExportSpec {
    /// Random name, drawn by the caller.
    pub id: ExportId,
    /// Whether peers read or write.
    pub kind: ExportKind,
    /// Which cache.
    pub cache: CacheId,
    /// The pinned blocks, in logical order.
    pub blocks: BlockTable,
    /// Layers of the cache.
    pub num_layers: u32,
    /// Tokens the blocks hold.
    pub num_tokens: u64,
    /// The caller's digest of the prefix.
    pub digest: Vec<u8>,
    /// What the bytes mean.
    pub fingerprint: [u8; 32],
    /// Consumers the export is for; an offer has one.
    pub consumers: u32,
    /// First lease.
    pub lease: Duration,
}

/// Where an export stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExportState {
    /// Can be claimed.
    Active,
    /// The lease is over; claims made in time still run and keep the blocks pinned.
    Expiring,
    /// Released while somebody may still write into the blocks; not yet reusable.
    Releasing,
    /// Every consumer has had it or declined it, and at least one has had it.
    Done,
    /// Every consumer declined it.
    Declined,
    /// Every byte of the offer was written.
    Filled,
    /// Released by its owner.
    Released,
    /// The lease ended.
    Expired,
    /// Never heard of, or forgotten.
    Unknown,
}

impl ExportState {
    /// The lowercase name shown to users.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Expiring => "expiring",
            Self::Releasing => "releasing",
            Self::Done => "done",
            Self::Declined => "declined",
            Self::Filled => "filled",
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Unknown => "unknown",
        }
    }

    /// Whether its outcome is decided.
    pub fn is_ended(self) -> bool {
        !matches!(self, Self::Active | Self::Expiring)
    }

    /// Whether no peer can touch the blocks any more, so that they may be reused.
    pub fn is_quiesced(self) -> bool {
        !matches!(self, Self::Active | Self::Expiring | Self::Releasing)
    }

    /// The error that an operation on an export in this state gets, if any.
    pub(crate) fn refusal(self, operation: &'static str) -> Option<Error> {
        let (kind, text) = match self {
            Self::Active => return None,
            Self::Done => (ErrorKind::ReferenceUsed, "every consumer of the export has had it"),
            Self::Filled => (ErrorKind::ReferenceUsed, "every block of the offer is written"),
            Self::Declined => (ErrorKind::ReferenceUsed, "every consumer of the export has declined it"),
            Self::Releasing | Self::Released => (ErrorKind::ReferenceReleased, "the owner released the export"),
            Self::Expiring | Self::Expired => (ErrorKind::ReferenceExpired, "the lease of the export is over"),
            Self::Unknown => (ErrorKind::ReferenceUnknown, "the owner knows no such export"),
        };
        let hint = "it cannot become valid again: ask the owner for a new one, or recompute the prefix";
        Some(Error::new(kind, operation, text).with_hint(hint))
    }
}

/// Blocks by layers that a claim covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    pub(crate) first_block: u32,
    pub(crate) num_blocks: u32,
    pub(crate) first_layer: u32,
    pub(crate) num_layers: u32,
}

impl Area {
    /// Checks the area against what is exported.
    pub(crate) fn check(self, num_blocks: u32, num_layers: u32) -> Result<()> {
        let ranges = [
            ("blocks", self.first_block, self.num_blocks, num_blocks),
            ("layers", self.first_layer, self.num_layers, num_layers),
        ];
        for (what, first, count, total) in ranges {
            let end = u64::from(first) + u64::from(count);
            if end > u64::from(total) {
                let text = format!("{what} `{first}..{end}` were claimed, the export has `{total}`");
                return Err(Error::new(ErrorKind::Layout, "claim", text)
                    .with_hint("both sides must start with the same layout"));
            }
        }
        Ok(())
    }

    fn units(self) -> u64 {
        u64::from(self.num_blocks) * u64::from(self.num_layers)
    }

    fn layers(self) -> std::ops::Range<u32> {
        self.first_layer..self.first_layer + self.num_layers
    }
}

/// Which units of an offer are taken: disjoint block ranges per layer.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    taken: BTreeMap<u32, BTreeMap<u32, u32>>,
    written: u64,
}

impl Coverage {
    /// Takes an area; a single unit that is taken already refuses all of it.
    pub(crate) fn take(&mut self, area: Area) -> Result<()> {
        if area.num_blocks == 0 {
            return Ok(());
        }
        let end = area.first_block + area.num_blocks;
        for layer in area.layers() {
            let below = self
                .taken
                .get(&layer)
                .and_then(|ranges| ranges.range(..end).next_back());
            if let Some((&first, &other_end)) = below.filter(|&(_, &other_end)| other_end > area.first_block) {
                let text =
                    format!("blocks `{first}..{other_end}` of layer `{layer}` are written already or being written");
                return Err(
                    Error::new(ErrorKind::ReferenceUsed, "claim", text).with_hint("claim each part of an offer once")
                );
            }
        }
        for layer in area.layers() {
            self.taken.entry(layer).or_default().insert(area.first_block, end);
        }
        Ok(())
    }

    /// Gives an area back that was taken and not written.
    pub(crate) fn give_back(&mut self, area: Area) {
        if area.num_blocks == 0 {
            return;
        }
        for layer in area.layers() {
            if let Some(ranges) = self.taken.get_mut(&layer) {
                ranges.remove(&area.first_block);
            }
        }
    }

    /// Counts a taken area as written.
    pub(crate) fn commit(&mut self, area: Area) {
        self.written += area.units();
    }
}

/// One live export.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) spec: ExportSpec,
    pub(crate) blocks: Arc<BlockTable>,
    pub(crate) state: ExportState,
    pub(crate) claims: BTreeSet<(PeerKey, TransferId)>,
    completed: u32,
    rejected: BTreeSet<(Incarnation, u64)>,
    coverage: Coverage,
}

impl Export {
    pub(crate) fn new(spec: ExportSpec) -> Self {
        Self {
            blocks: Arc::new(spec.blocks.clone()),
            spec,
            state: ExportState::Active,
            claims: BTreeSet::new(),
            completed: 0,
            rejected: BTreeSet::new(),
            coverage: Coverage::default(),
        }
    }

    fn slots_taken(&self) -> u64 {
        self.claims.len() as u64 + u64::from(self.completed) + self.rejected.len() as u64
    }

    /// Gives a consumer its slot, or a writer its area.
    pub(crate) fn admit(&mut self, claim: (PeerKey, TransferId), area: Area) -> Result<()> {
        match self.spec.kind {
            ExportKind::Export => {
                let consumers = self.spec.consumers;
                if self.slots_taken() >= u64::from(consumers) {
                    let text = format!("the export is for `{consumers}` consumers and all slots are taken");
                    return Err(Error::new(ErrorKind::ReferenceUsed, "claim", text)
                        .with_hint("export with a larger `consumers`"));
                }
            }
            ExportKind::Offer => self.coverage.take(area)?,
        }
        self.claims.insert(claim);
        Ok(())
    }

    /// Ends a claim; without success the slot or the area is free again.
    pub(crate) fn end_claim(&mut self, claim: (PeerKey, TransferId), area: Area, success: bool) {
        if !self.claims.remove(&claim) {
            return;
        }
        match (self.spec.kind, success) {
            (_, true) => {
                self.completed += 1;
                self.coverage.commit(area);
            }
            (ExportKind::Offer, false) => self.coverage.give_back(area),
            (ExportKind::Export, false) => {}
        }
    }

    /// Whether nobody has claimed or declined it.
    pub(crate) fn is_unclaimed(&self) -> bool {
        self.slots_taken() == 0
    }

    /// A consumer declines; `false` when that changed nothing.
    pub(crate) fn reject(&mut self, who: (Incarnation, u64)) -> bool {
        let free = self.slots_taken() < u64::from(self.spec.consumers);
        free && self.rejected.insert(who)
    }

    /// The state that the bookkeeping calls for now.
    pub(crate) fn due_state(&self) -> ExportState {
        let complete = match self.spec.kind {
            ExportKind::Export => self.export_complete(),
            ExportKind::Offer => self.offer_complete(),
        };
        match (self.state, complete, self.claims.is_empty()) {
            (ExportState::Active | ExportState::Expiring, Some(end), true) => end,
            (ExportState::Expiring, None, true) => ExportState::Expired,
            (ExportState::Releasing, _, true) => ExportState::Released,
            (state, ..) => state,
        }
    }

    fn export_complete(&self) -> Option<ExportState> {
        let finished = u64::from(self.completed) + self.rejected.len() as u64;
        let end = if self.completed == 0 {
            ExportState::Declined
        } else {
            ExportState::Done
        };
        (finished >= u64::from(self.spec.consumers)).then_some(end)
    }

    fn offer_complete(&self) -> Option<ExportState> {
        if !self.rejected.is_empty() {
            return Some(ExportState::Declined);
        }
        let all = u64::from(self.spec.num_layers) * self.blocks.len() as u64;
        (self.completed > 0 && self.coverage.written == all).then_some(ExportState::Filled)
    }
}

/// How the last exports ended, bounded.
#[derive(Debug)]
pub(crate) struct Tombstones {
    states: BTreeMap<ExportId, ExportState>,
    order: VecDeque<ExportId>,
    cap: usize,
}

impl Tombstones {
    pub(crate) fn new(cap: usize) -> Self {
        Self {
            states: BTreeMap::new(),
            order: VecDeque::new(),
            cap,
        }
    }

    pub(crate) fn bury(&mut self, export: ExportId, state: ExportState) {
        if self.states.insert(export, state).is_none() {
            self.order.push_back(export);
        }
        if self.order.len() > self.cap
            && let Some(oldest) = self.order.pop_front()
        {
            self.states.remove(&oldest);
        }
    }

    pub(crate) fn state(&self, export: ExportId) -> ExportState {
        self.states.get(&export).copied().unwrap_or(ExportState::Unknown)
    }
}
