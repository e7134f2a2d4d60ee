//! Notifications that wait for the application.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

/// How many are kept for an application that never asks; then the oldest go first, counted.
const MAX_INBOX: usize = 1 << 16;
/// Bytes kept, likewise.
const MAX_INBOX_BYTES: usize = 64 << 20;

#[derive(Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    messages: VecDeque<(String, Vec<u8>)>,
    bytes: usize,
    dropped: u64,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    pub(crate) fn deliver(&self, sender: String, bytes: Vec<u8>) {
        let mut state = self.lock();
        state.bytes += bytes.len();
        while state.messages.len() >= MAX_INBOX || state.bytes > MAX_INBOX_BYTES {
            let Some((_, oldest)) = state.messages.pop_front() else {
                break;
            };
            state.bytes -= oldest.len();
            state.dropped += 1;
        }
        state.messages.push_back((sender, bytes));
    }

    /// Everything that came since the last call, oldest first.
    pub(crate) fn take(&self) -> Vec<(String, Vec<u8>)> {
        let mut state = self.lock();
        state.bytes = 0;
        std::mem::take(&mut state.messages).into()
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.lock().dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first_and_are_counted() {
        let inbox = Inbox::default();
        for index in 0..MAX_INBOX + 3 {
            inbox.deliver("a".to_owned(), index.to_le_bytes().to_vec());
        }
        let taken = inbox.take();
        assert_eq!((taken.len(), inbox.dropped()), (MAX_INBOX, 3));
        assert_eq!(taken[0].1, 3_usize.to_le_bytes());
    }

    #[test]
    fn few_large_ones_fill_it_too() {
        let inbox = Inbox::default();
        for index in 0..66 {
            inbox.deliver("a".to_owned(), vec![index; 1 << 20]);
        }
        assert_eq!(inbox.dropped(), 2);
        let taken = inbox.take();
        assert_eq!((taken.len(), taken[0].1[0]), (64, 2));
        inbox.deliver("a".to_owned(), vec![0; 1 << 20]);
        assert_eq!((inbox.take().len(), inbox.dropped()), (1, 2), "taking makes room");
    }
}
