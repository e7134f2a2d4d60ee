//! Room that is taken at one end and given back at the other: a ring, as numbers. It holds no memory.

/// Every piece begins at a multiple of this.
const ALIGN: u64 = 256;

/// Which bytes of a ring are taken. Places are counted on and on; a place modulo the capacity is an offset.
#[derive(Debug)]
pub(super) struct Ring {
    capacity: u64,
    /// The first free place.
    head: u64,
    /// The oldest place that is taken.
    tail: u64,
}

/// A piece of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    /// Where it begins in the memory.
    pub(super) offset: usize,
    /// Where it ends, for [`Ring::release`].
    pub(super) end: u64,
}

impl Ring {
    /// A ring of so many bytes, rounded down to what pieces are made of.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity as u64 / ALIGN * ALIGN,
            head: 0,
            tail: 0,
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Takes contiguous bytes; `None` while they are not free.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Taken> {
        let bytes = (bytes as u64).checked_next_multiple_of(ALIGN)?;
        if bytes > self.capacity {
            return None;
        }
        if self.head == self.tail {
            // Nothing is taken: no need to go on in the middle of a lap.
            self.head = self.head.next_multiple_of(self.capacity.max(1));
            self.tail = self.head;
        }
        let mut start = self.head;
        let within = start % self.capacity.max(1);
        if within + bytes > self.capacity {
            start += self.capacity - within;
        }
        let end = start + bytes;
        if end - self.tail > self.capacity {
            return None;
        }
        self.head = end;
        Some(Taken {
            offset: (start % self.capacity.max(1)) as usize,
            end,
        })
    }

    /// Gives back everything up to the end of a piece.
    pub(super) fn release(&mut self, end: u64) {
        self.tail = self.tail.max(end.min(self.head));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_two_pieces_overlap(sizes in proptest::collection::vec((0_usize..2000, 0_usize..3), 1..200)) {
            let mut ring = Ring::new(4096 + 100);
            prop_assert_eq!(ring.capacity(), 4096);
            let mut taken: VecDeque<(Taken, usize)> = VecDeque::new();
            for (bytes, leave) in sizes {
                match ring.take(bytes) {
                    Some(piece) => {
                        let range = |piece: &Taken, bytes: usize| piece.offset..piece.offset + bytes;
                        let new = range(&piece, bytes);
                        prop_assert!(new.end <= 4096);
                        for (other, bytes) in &taken {
                            let other = range(other, *bytes);
                            prop_assert!(new.end <= other.start || other.end <= new.start || new.is_empty() || other.is_empty());
                        }
                        taken.push_back((piece, bytes));
                    }
                    None => prop_assert!(!taken.is_empty(), "an empty ring has room"),
                }
                for _ in 0..leave.min(taken.len()) {
                    let (piece, _) = taken.pop_front().unwrap();
                    ring.release(piece.end);
                }
            }
        }
    }

    #[test]
    fn a_full_ring_is_whole_again_when_all_is_given_back() {
        let mut ring = Ring::new(1024);
        for _ in 0..5 {
            let first = ring.take(500).unwrap();
            let second = ring.take(512).unwrap();
            assert_eq!((first.offset, second.offset), (0, 512));
            assert_eq!(ring.take(0).map(|piece| piece.offset), Some(0), "nothing needs no room");
            assert_eq!(ring.take(1), None);
            ring.release(first.end);
            assert!(ring.take(513).is_none());
            ring.release(second.end);
            assert_eq!(ring.take(1024).map(|piece| piece.offset), Some(0));
            assert_eq!(ring.take(1025), None);
            ring.release(u64::MAX);
        }
        assert_eq!(Ring::new(0).take(1), None);
    }
}
