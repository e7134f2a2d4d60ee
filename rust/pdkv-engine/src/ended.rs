//! The exports that ended since somebody asked: a bounded list that is kept only for engines whose user asks,
//! or has taken an issuer and so is going to.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use pdkv_core::id::ExportId;

/// How many ids wait to be taken; then the oldest go. Twice the exports that can be alive, 2 MiB.
const MAX_ENDED: usize = 1 << 17;

#[derive(Default)]
pub(crate) struct EndedExports {
    collecting: AtomicBool,
    /// Whether the list holds anything, so that asking in vain takes no lock.
    any: AtomicBool,
    ids: Mutex<VecDeque<ExportId>>,
}

impl EndedExports {
    /// From now on the list is kept.
    pub(crate) fn collect(&self) {
        self.collecting.store(true, Ordering::Release);
    }

    pub(crate) fn push(&self, export: ExportId) {
        if !self.collecting.load(Ordering::Acquire) {
            return;
        }
        let mut ids = self.ids.lock().expect("no holder panics");
        if ids.len() == MAX_ENDED {
            ids.pop_front();
        }
        ids.push_back(export);
        self.any.store(true, Ordering::Release);
    }

    /// What ended since the last call, oldest first.
    pub(crate) fn take(&self) -> Vec<ExportId> {
        self.collect();
        if !self.any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut ids = self.ids.lock().expect("no holder panics");
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut *ids).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_kept_before_somebody_asks_and_then_the_last_ones() {
        let id = |n: usize| ExportId::new((n as u128).to_le_bytes());
        let ended = EndedExports::default();
        ended.push(id(1));
        assert!(ended.take().is_empty(), "nobody had asked");
        ended.push(id(2));
        ended.push(id(3));
        assert_eq!(ended.take(), [id(2), id(3)]);
        assert!(ended.take().is_empty());
        for n in 0..MAX_ENDED + 5 {
            ended.push(id(n));
        }
        let taken = ended.take();
        assert_eq!((taken.len(), taken[0]), (MAX_ENDED, id(5)));
    }
}
