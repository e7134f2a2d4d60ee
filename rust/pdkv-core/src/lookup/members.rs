//! A set of places, sorted as they stand in the circle. It stores no labels: it asks the order for them, so that
//! labels may be spread anew without touching any set.
//!
//! A list of short sorted chunks: all operations are a binary search and a move within one chunk. Chunks are shared
//! between copies until one of them changes.

use std::sync::Arc;

use super::order::{Order, Slot};

/// A chunk that grows past this is split.
const CHUNK: usize = 512;

/// Sorted places.
#[derive(Clone, Debug, Default)]
pub(super) struct Members {
    /// None is empty.
    chunks: Vec<Arc<Vec<Slot>>>,
}

impl Members {
    /// Adds a place that is not in the set.
    pub(super) fn insert(&mut self, slot: Slot, order: &Order) {
        let label = order.label(slot);
        let Some(index) = self.chunk_of(label, order) else {
            self.chunks.push(Arc::new(vec![slot]));
            return;
        };
        let chunk = Arc::make_mut(&mut self.chunks[index]);
        let at = chunk.partition_point(|&other| order.label(other) < label);
        chunk.insert(at, slot);
        if chunk.len() > CHUNK {
            let rest = chunk.split_off(CHUNK / 2);
            self.chunks.insert(index + 1, Arc::new(rest));
        }
    }

    /// Removes a place, if it is in the set.
    pub(super) fn remove(&mut self, slot: Slot, order: &Order) {
        let label = order.label(slot);
        let Some(index) = self.chunk_of(label, order) else {
            return;
        };
        let chunk = Arc::make_mut(&mut self.chunks[index]);
        if let Ok(at) = chunk.binary_search_by_key(&label, |&other| order.label(other)) {
            chunk.remove(at);
        }
        if chunk.is_empty() {
            self.chunks.remove(index);
        } else if chunk.len() < CHUNK / 8 && index + 1 < self.chunks.len() {
            self.join(index);
        }
    }

    /// The place that comes first in the order.
    pub(super) fn first(&self, order: &Order) -> Option<Slot> {
        let start = order.start();
        let index = self.chunk_of(start, order)?;
        let chunk = &self.chunks[index];
        let at = chunk.partition_point(|&other| order.label(other) < start);
        let next = || self.chunks.get(index + 1).map(|chunk| chunk[0]);
        // Past the last one the circle goes on at the first.
        chunk.get(at).copied().or_else(next).or(Some(self.chunks[0][0]))
    }

    /// All places, from the smallest label on.
    pub(super) fn iter(&self) -> impl Iterator<Item = Slot> + '_ {
        self.chunks.iter().flat_map(|chunk| chunk.iter().copied())
    }

    /// The chunk in which a label would stand.
    fn chunk_of(&self, label: u64, order: &Order) -> Option<usize> {
        let after = self.chunks.partition_point(|chunk| order.label(chunk[0]) <= label);
        (!self.chunks.is_empty()).then(|| after.saturating_sub(1))
    }

    /// Joins a chunk with the next one if both are short, so that many removals leave few chunks.
    fn join(&mut self, index: usize) {
        if self.chunks[index].len() + self.chunks[index + 1].len() <= CHUNK / 2 {
            let next = self.chunks.remove(index + 1);
            Arc::make_mut(&mut self.chunks[index]).extend_from_slice(&next);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_set_stays_sorted_and_finds_the_first_from_the_head() {
        let mut order = Order::default();
        let places: Vec<Slot> = (0..5_000).map(|_| order.push()).collect();
        let mut members = Members::default();
        for index in 0..places.len() {
            members.insert(places[index * 1_777 % places.len()], &order);
        }
        assert!(members.iter().eq(places.iter().copied()));
        order.take(places[2_999]);
        assert_eq!(members.first(&order), Some(places[3_000]));
        let copy = members.clone();
        for &place in &places[1_000..] {
            members.remove(place, &order);
        }
        assert_eq!(
            members.first(&order),
            Some(places[0]),
            "past the end it goes on at the beginning"
        );
        assert_eq!((members.iter().count(), copy.iter().count()), (1_000, 5_000));
        for &place in &places {
            members.remove(place, &order);
        }
        assert_eq!(members.first(&order), None);
    }
}
