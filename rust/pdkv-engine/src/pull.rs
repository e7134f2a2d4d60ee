//! From a granted claim to moving bytes: the plan is built from both block tables, then given to
//! the chosen link, or run on the spot when it is small.

use std::sync::Arc;
use std::time::Instant;

use pdkv_core::block_table::BlockTable;
use pdkv_core::layout::KvLayout;
use pdkv_core::plan::{PageWalk, Selection, WireOrder};
use pdkv_core::wire::Grant;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::Event;

use crate::lists::Memories;
use crate::mover::contained;
use crate::remains::Remains;
use crate::remote::{RegionList, RemoteCache};
use crate::shared::Shared;
use crate::transfer::TransferCore;
use crate::transport::work::Program;
use crate::transport::{Direction, Link, Work, start};

/// Work up to this size is moved by the thread that learns of the grant: cheaper than waking one.
pub(crate) const INLINE_BYTES: u64 = 256 << 10;
/// Plans over more block runs than this are built off the progress thread.
const INLINE_RUNS: usize = 1 << 10;

/// A posted transfer that waits for its grant.
pub(crate) struct PendingMove {
    pub(crate) direction: Direction,
    pub(crate) after: Option<Arc<Event>>,
    pub(crate) link: Arc<dyn Link>,
    pub(crate) layout: Arc<KvLayout>,
    pub(crate) memory: Arc<Memories>,
    pub(crate) blocks: BlockTable,
    pub(crate) remote_cache: Arc<RemoteCache>,
    pub(crate) remote: RegionList,
    pub(crate) selection: Selection,
    /// For a link on which each side walks its own table; with none, one side knows both.
    pub(crate) order: Option<WireOrder>,
}

impl PendingMove {
    /// Starts the movers. Every path from here ends in `Shared::moved` exactly once.
    pub(crate) fn start(self, shared: &Arc<Shared>, core: &Arc<TransferCore>, grant: Grant) {
        if self.blocks.runs().len() <= INLINE_RUNS {
            self.launch(shared, core, &grant);
            return;
        }
        let (again, mine) = (Arc::clone(shared), Arc::clone(core));
        if let Err(error) = shared.movers.task(move || self.launch(&again, &mine, &grant)) {
            shared.moved_id(core.id(), core, Err(error));
        }
    }

    /// Nothing will be moved: what it holds goes where nobody waits for it.
    pub(crate) fn bequeath(self, remains: &mut Remains) {
        remains.add_memories(self.memory);
        remains.add_all(self.after);
        remains.add_regions(self.remote);
    }

    fn launch(self, shared: &Arc<Shared>, core: &Arc<TransferCore>, grant: &Grant) {
        let started = Instant::now();
        let program = match contained(|| self.program(grant)).flatten() {
            Ok(program) => program,
            Err(error) => {
                let mut remains = Remains::default();
                self.bequeath(&mut remains);
                remains.bury(&shared.movers);
                return shared.moved_id(core.id(), core, Err(error));
            }
        };
        core.edit_stats(|stats| stats.plan_us = started.elapsed().as_secs_f64() * 1e6);
        let small = program.total_bytes() <= INLINE_BYTES;
        let link = self.link;
        let work = Arc::new(Work::new(
            Arc::clone(core),
            Arc::clone(shared),
            self.direction,
            program,
            self.after,
            self.memory,
            self.remote,
        ));
        start(link, work, small);
    }

    fn program(&self, grant: &Grant) -> Result<Program> {
        if let Some(order) = self.order {
            let (layout, blocks, selection) = (&self.layout, &self.blocks, &self.selection);
            return match self.direction {
                Direction::Read => PageWalk::scatter(layout, blocks, selection, order),
                Direction::Write => PageWalk::new(layout, blocks, selection, order),
            }
            .map(Program::Own);
        }
        let theirs = grant
            .blocks
            .as_ref()
            .filter(|blocks| blocks.len() == self.blocks.len())
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Integrity,
                    "grant",
                    format!(
                        "the grant names other than the `{}` blocks that were claimed",
                        self.blocks.len()
                    ),
                )
            })?;
        let pairing = self
            .remote_cache
            .pairing(&self.layout, self.direction, &self.selection)?;
        match self.direction {
            Direction::Read => pairing.plan(theirs, &self.blocks),
            Direction::Write => pairing.plan(&self.blocks, theirs),
        }
        .map(Program::Joint)
    }
}
