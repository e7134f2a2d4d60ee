//! Notifications that wait for the application.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

/// How many are kept for an application that never asks; then the oldest go first, counted.
const MAX_INBOX: usize = 1 << 16;

#[derive(Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    messages: VecDeque<(String, Vec<u8>)>,
    dropped: u64,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    pub(crate) fn deliver(&self, sender: String, bytes: Vec<u8>) {
        let mut state = self.lock();
        if state.messages.len() == MAX_INBOX {
            state.messages.pop_front();
            state.dropped += 1;
        }
        state.messages.push_back((sender, bytes));
    }

    /// Everything that came since the last call, oldest first.
    pub(crate) fn take(&self) -> Vec<(String, Vec<u8>)> {
        std::mem::take(&mut self.lock().messages).into()
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
}
