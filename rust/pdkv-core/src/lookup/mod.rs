//! Finds entries by their tokens, in the order in which a lookup buffer promises to give them out.
//!
//! Two sequences match when one is a prefix of the other; a sequence of no tokens matches nothing. Among those that
//! match, the first in a circular first-in-first-out order is found, or the longest. The order is the one that a queue
//! has which is scanned from its front, each entry that does not match being moved to its back. What an entry holds,
//! who waits for it and who may have it are not known here.
//!
//! A search costs O(tokens matched), and a binary search at each node on the way where entries end. An insertion or
//! removal costs O(tokens) and a binary search at each node on the way. Every node keeps the entries below it: memory
//! grows with the number of entries and the number of branchings on their way.

mod members;
mod order;
mod tree;

use crate::{Error, ErrorKind, Result};
use order::{Order, Slot};
use tree::{NodeId, Tree};

/// Names an entry of one index. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryId(pub u64);

impl EntryId {
    fn new(slot: Slot, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(slot))
    }

    fn slot(self) -> Slot {
        self.0 as Slot
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Which of the entries that match is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// The first in the order.
    Either,
    /// The one with the most tokens in common; of several such the first in the order.
    LongestPrefix,
}

/// An entry that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Which one.
    pub entry: EntryId,
    /// How many tokens were compared: the length of the shorter side, all equal.
    pub matched: usize,
}

/// Entries by their tokens.
///
/// ```
/// use pdkv_core::lookup::{LookupIndex, Match};
/// let mut index = LookupIndex::default();
/// let short = index.insert(&[1, 2]);
/// let long = index.insert(&[1, 2, 3, 4]);
/// assert_eq!(index.find(&[1, 2, 3], Match::Either).unwrap().entry, short);
/// assert_eq!(index.find(&[1, 2, 3], Match::LongestPrefix).unwrap().entry, long);
/// assert_eq!(index.find(&[1, 3], Match::Either), None);
/// ```
#[derive(Clone, Debug, Default)]
pub struct LookupIndex {
    order: Order,
    tree: Tree,
    /// Where each slot's entry ends; none for a slot that is free.
    ends: Vec<Option<NodeId>>,
    in_sight: usize,
}

impl LookupIndex {
    /// Adds an entry at the end of the order. Without tokens only [`LookupIndex::front`] can find it.
    pub fn insert(&mut self, tokens: &[i64]) -> EntryId {
        let slot = self.order.push();
        let node = self.tree.insert(tokens, slot, &self.order);
        if self.ends.len() <= slot as usize {
            self.ends.resize(slot as usize + 1, None);
        }
        self.ends[slot as usize] = Some(node);
        self.in_sight += 1;
        EntryId::new(slot, self.order.generation(slot))
    }

    /// Finds an entry of which the tokens are a prefix of `tokens` or the other way round. Nothing changes.
    pub fn find(&self, tokens: &[i64], how: Match) -> Option<Found> {
        let mut best: Option<tree::Candidate> = None;
        self.tree.walk(tokens, &self.order, |candidate| {
            let earlier =
                |other: &tree::Candidate| self.order.distance(candidate.slot) < self.order.distance(other.slot);
            // They come shortest first.
            if how == Match::LongestPrefix || best.as_ref().is_none_or(earlier) {
                best = Some(candidate);
            }
        });
        best.map(|best| Found {
            entry: self.id(best.slot),
            matched: best.matched,
        })
    }

    /// The first in the order, whatever its tokens.
    pub fn front(&self) -> Option<EntryId> {
        self.tree.front(&self.order).map(|slot| self.id(slot))
    }

    /// Takes an entry out of sight, keeping its place. The order now begins behind it: those before it stand behind
    /// the newest.
    ///
    /// # Errors
    /// `Internal` if there is no such entry in sight.
    pub fn take(&mut self, entry: EntryId) -> Result<()> {
        let node = self.node(entry, false)?;
        self.tree.hide(node, entry.slot(), &self.order);
        self.order.take(entry.slot());
        self.in_sight -= 1;
        Ok(())
    }

    /// Puts an entry that was taken back at its old place. If nothing in sight stands between that and where the order
    /// begins, the order begins with it.
    ///
    /// # Errors
    /// `Internal` if no such entry was taken.
    pub fn put_back(&mut self, entry: EntryId) -> Result<()> {
        let node = self.node(entry, true)?;
        self.order.put_back(entry.slot());
        self.tree.show(node, entry.slot(), &self.order);
        self.in_sight += 1;
        Ok(())
    }

    /// Removes an entry for good, taken or not.
    ///
    /// # Errors
    /// `Internal` if there is no such entry.
    pub fn remove(&mut self, entry: EntryId) -> Result<()> {
        let slot = entry.slot();
        let out = self.ends.get(slot as usize).is_some_and(Option::is_some) && self.order.is_out(slot);
        let node = self.node(entry, out)?;
        if !out {
            self.tree.hide(node, slot, &self.order);
            self.in_sight -= 1;
        }
        self.ends[slot as usize] = None;
        self.tree.remove(node);
        self.order.remove(slot);
        Ok(())
    }

    /// How many are in sight.
    pub fn len(&self) -> usize {
        self.in_sight
    }

    /// Whether none is in sight.
    pub fn is_empty(&self) -> bool {
        self.in_sight == 0
    }

    /// All that are in sight, in order.
    pub fn entries(&self) -> Vec<EntryId> {
        let mut slots: Vec<Slot> = self.tree.iter().collect();
        slots.sort_unstable_by_key(|&slot| self.order.distance(slot));
        slots.into_iter().map(|slot| self.id(slot)).collect()
    }

    fn id(&self, slot: Slot) -> EntryId {
        EntryId::new(slot, self.order.generation(slot))
    }

    /// Where an entry ends that is out of sight as `out` says.
    fn node(&self, entry: EntryId, out: bool) -> Result<NodeId> {
        let slot = entry.slot();
        self.ends
            .get(slot as usize)
            .copied()
            .flatten()
            .filter(|_| self.order.generation(slot) == entry.generation() && self.order.is_out(slot) == out)
            .ok_or_else(|| {
                let state = if out { "taken" } else { "in sight" };
                Error::new(
                    ErrorKind::Internal,
                    "lookup",
                    format!("no entry `{}` is {state}", entry.0),
                )
            })
    }
}

#[cfg(test)]
mod tests;
