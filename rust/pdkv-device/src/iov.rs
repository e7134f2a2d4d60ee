//! A growing list of address ranges in the layout of the kernel's `iovec`, with a cursor.
//!
//! Addresses are kept as integers: the list is handed to the kernel only, never dereferenced here.

/// One range; laid out like `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    base: usize,
    len: usize,
}

const _: () = assert!(size_of::<Piece>() == size_of::<libc::iovec>());
const _: () = assert!(align_of::<Piece>() == align_of::<libc::iovec>());
const _: () = assert!(std::mem::offset_of!(Piece, base) == std::mem::offset_of!(libc::iovec, iov_base));
const _: () = assert!(std::mem::offset_of!(Piece, len) == std::mem::offset_of!(libc::iovec, iov_len));

/// Ranges in order, neighbours merged, the first `done` of them already moved.
#[derive(Debug, Default)]
pub(crate) struct PieceList {
    pieces: Vec<Piece>,
    done: usize,
}

impl PieceList {
    /// Whether a range that begins at `base` continues the last one.
    pub(crate) fn continues(&self, base: usize) -> bool {
        self.pieces.last().is_some_and(|last| last.base + last.len == base)
    }

    /// Appends a range, merged with the last one where the two touch.
    pub(crate) fn push(&mut self, base: usize, len: usize) {
        match self.pieces.last_mut() {
            Some(last) if last.base + last.len == base => last.len += len,
            _ => self.pieces.push(Piece { base, len }),
        }
    }

    /// Appends a range that stays apart from the last one.
    pub(crate) fn push_apart(&mut self, base: usize, len: usize) {
        self.pieces.push(Piece { base, len });
    }

    /// The number of ranges, moved ones included.
    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Where the first byte that is not moved yet lies.
    pub(crate) fn next_address(&self) -> usize {
        self.pieces.get(self.done).map_or(0, |piece| piece.base)
    }

    /// The ranges that are not moved yet, for a system call: pointer and count.
    pub(crate) fn rest(&self) -> (*const libc::iovec, usize) {
        let rest = &self.pieces[self.done..];
        (rest.as_ptr().cast(), rest.len())
    }

    /// Marks `bytes` as moved; a range moved in part is cut at its front.
    pub(crate) fn advance(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let Some(piece) = self.pieces.get_mut(self.done) else {
                return;
            };
            if bytes < piece.len {
                piece.base += bytes;
                piece.len -= bytes;
                return;
            }
            bytes -= piece.len;
            self.done += 1;
        }
    }

    /// Appends what is not moved yet of another list.
    pub(crate) fn extend_from(&mut self, other: &Self) {
        self.pieces.extend_from_slice(&other.pieces[other.done..]);
    }

    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        self.done = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_sequence_of_partial_moves_visits_every_byte_once(
            lens in proptest::collection::vec((1_usize..50, any::<bool>()), 1..40),
            steps in proptest::collection::vec(1_usize..70, 1..200),
        ) {
            let mut list = PieceList::default();
            let (mut address, mut expected) = (1000, Vec::new());
            for (len, gap) in lens {
                address += usize::from(gap) * 7;
                list.push(address, len);
                expected.extend(address..address + len);
                address += len;
            }
            let mut seen = Vec::new();
            let mut steps = steps.into_iter().cycle();
            while seen.len() < expected.len() {
                let mut left = steps.next().unwrap_or(1).min(expected.len() - seen.len());
                let mut probe = list.pieces[list.done..].iter();
                let step = left;
                while left > 0 {
                    let piece = probe.next().copied().unwrap_or(Piece { base: 0, len: usize::MAX });
                    let take = left.min(piece.len);
                    seen.extend(piece.base..piece.base + take);
                    left -= take;
                }
                list.advance(step);
            }
            prop_assert_eq!(list.rest().1, 0);
            prop_assert_eq!(seen, expected);
        }
    }

    #[test]
    fn neighbours_merge_and_gaps_do_not() {
        let mut list = PieceList::default();
        list.push(100, 10);
        assert!(list.continues(110) && !list.continues(111));
        list.push(110, 5);
        list.push(116, 5);
        assert_eq!(list.pieces, [Piece { base: 100, len: 15 }, Piece { base: 116, len: 5 }]);
    }
}
