//! The lists of a batch of copies, as the driver takes them, kept from one to the next.

use pdkv_core::Result;

use super::batch::copy_batch_async;
use super::stream::Stream;
use crate::kernels::Run;

/// Copies that one call asks for: as many as one that is measured has. While the driver takes them, others of the process wait for it.
const COPIES: usize = 512;

#[derive(Debug, Default)]
pub(super) struct BatchLists {
    dsts: Vec<u64>,
    srcs: Vec<u64>,
    sizes: Vec<usize>,
}

impl BatchLists {
    /// Makes them the lists of these runs.
    pub(super) fn fill(&mut self, runs: &[Run]) {
        self.dsts.clear();
        self.srcs.clear();
        self.sizes.clear();
        for run in runs.iter().filter(|run| run.bytes > 0) {
            self.dsts.push(run.dst);
            self.srcs.push(run.src);
            self.sizes.push(run.bytes as usize);
        }
    }

    /// Asks a stream for the copies, some at a time.
    ///
    /// # Errors
    /// As [`copy_batch_async`]; the stream may have some of them then.
    ///
    /// # Safety
    /// As for [`copy_batch_async`], of all of them.
    pub(super) unsafe fn ask(&self, stream: &Stream) -> Result<()> {
        let len = self.sizes.len();
        (0..len).step_by(COPIES).try_for_each(|first| {
            let some = first..len.min(first + COPIES);
            let (dsts, srcs) = (&self.dsts[some.clone()], &self.srcs[some.clone()]);
            // SAFETY: as the caller promises.
            unsafe { copy_batch_async(stream, dsts, srcs, &self.sizes[some]) }
        })
    }
}
