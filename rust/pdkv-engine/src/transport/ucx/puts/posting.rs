//! One chunk of a transfer on its way into UCX, with a look at what carries memory of GPUs.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind};
use pdkv_ucx::{Direction as Way, Endpoint, Span};

use super::{BATCH, Job, LOOK, PATIENT, WINDOW};
use crate::transport::Direction;
use crate::transport::ucx::desk::Desk;
use crate::transport::ucx::devices::{Devices, Sides};
use crate::transport::ucx::door::Made;
use crate::transport::ucx::trial::refused;
use crate::transport::ucx::verdict::{carrier_of, names};
use crate::transport::work::Program;

impl Job {
    /// Where a pair of regions lies, if memory of a GPU is among them.
    fn sides(&self, (near, far): (u32, u32)) -> Option<Sides> {
        Sides::of(&self.work.local[near as usize], &self.work.remote[far as usize])
    }

    /// Posts the first piece between two regions and looks at what carries it. An adapter that reaches some memory of a GPU doesn't
    /// reach all of it by that, and UCX tells nobody that it has to do without.
    fn show(
        &self,
        desk: &Desk,
        endpoint: &Endpoint,
        pair: (u32, u32),
        span: &Span,
        (devices, sides): (&Devices, Sides),
    ) -> Result<(), Halt> {
        let (local, remote) = (&self.local[pair.0 as usize], &self.remote[pair.1 as usize]);
        let (near, far) = (span.local_offset, span.remote_offset);
        let probe = match self.work.direction {
            Direction::Read => endpoint.probe_get(local, near, remote, far, span.len, &self.tally),
            Direction::Write => endpoint.probe_put(local, near, remote, far, span.len, &self.tally),
        };
        let probe = match probe {
            Ok(probe) => probe,
            Err(error) => {
                self.work.fail(error);
                return Err(Halt::Work);
            }
        };
        let (carrier, policy) = (carrier_of(&probe), desk.shared.config.ucx.one_sided);
        if policy.allows(carrier) && devices.confirms(sides, carrier) {
            return Ok(());
        }
        let error = refused(carrier, &names(&probe.transports), policy.as_str());
        devices.settle(sides, Err(error.clone()));
        self.work.fail(error.clone());
        // It is under way, and perhaps nobody carries it out: only the end of the worker takes it back.
        Err(Halt::Lane(error))
    }
}

/// One chunk on its way into UCX.
pub(super) struct Posting<'a> {
    pub(super) job: &'a mut Job,
    pub(super) desk: &'a mut Desk,
    pub(super) made: &'a Made,
    pub(super) devices: &'a Devices,
    pub(super) endpoint: &'a Endpoint,
    /// The regions of the spans that are collected: ours and theirs.
    pub(super) pair: (u32, u32),
    pub(super) spans: Vec<Span>,
}

/// Why a chunk stops early.
pub(super) enum Halt {
    /// Only this work ends.
    Work,
    /// The lane ends.
    Lane(Error),
}

impl Posting<'_> {
    pub(super) fn walk(&mut self, units: Range<u64>) -> Result<(), Halt> {
        let work = Arc::clone(&self.job.work);
        let Program::Joint(plan) = &work.program else {
            work.fail(Error::new(
                ErrorKind::Internal,
                "move",
                "a one-sided lane needs both sides' places",
            ));
            return Err(Halt::Work);
        };
        let reads = work.direction == Direction::Read;
        let mut halt = None;
        let _ = plan.walk(units, |run| {
            let (near, far) = if reads { (run.dst, run.src) } else { (run.src, run.dst) };
            let pair = (near.region, far.region);
            let full = self.spans.len() == BATCH || (pair != self.pair && !self.spans.is_empty());
            if full && let Err(stop) = self.flush() {
                halt = Some(stop);
                return ControlFlow::Break(());
            }
            self.pair = pair;
            self.spans.push(Span {
                local_offset: near.offset,
                remote_offset: far.offset,
                len: run.len,
            });
            ControlFlow::Continue(())
        });
        match halt {
            Some(halt) => Err(halt),
            None => self.flush(),
        }
    }

    /// Posts what is collected, as soon as the window has room for it.
    fn flush(&mut self) -> Result<(), Halt> {
        let Self {
            job,
            desk,
            made,
            devices,
            endpoint,
            pair,
            spans,
        } = self;
        let (mut calls, mut idle, mut moved) = (0, 0, false);
        let sides = job.sides(*pair);
        // Whether lists are taken was tried with memory of the host.
        let listed = made.lists && job.work.direction == Direction::Write && sides.is_none();
        // A list counts as one operation, and is as much work as the spans in it.
        let (new, window) = if listed {
            (1, WINDOW / BATCH as u64)
        } else {
            (spans.len() as u64, WINDOW)
        };
        while job.tally.outstanding() + new > window {
            if job.over() || endpoint.failure().is_some() {
                return Err(Halt::Work);
            }
            let before = job.tally.outstanding();
            if made.worker.progress() || job.tally.outstanding() < before {
                (idle, moved) = (0, true);
            } else {
                idle += 1;
            }
            calls += 1;
            if calls == LOOK || idle > PATIENT {
                calls = 0;
                // What moved a moment ago will move again: stay awake for it.
                if std::mem::take(&mut moved) {
                    desk.stir();
                }
                desk.listen().map_err(Halt::Lane)?;
                desk.rest(Some(&made.worker), true, None).map_err(Halt::Lane)?;
            }
        }
        if job.over() {
            return Err(Halt::Work);
        }
        let way = match job.work.direction {
            Direction::Read => Way::Get,
            Direction::Write => Way::Put,
        };
        if let Some(sides) = sides.filter(|_| !job.seen.contains(pair)) {
            job.seen.push(*pair);
            job.show(desk, endpoint, *pair, &spans[0], (devices, sides))?;
            job.bytes += spans[0].len;
            job.runs += 1;
            spans.remove(0);
        }
        let (local, remote) = (&job.local[pair.0 as usize], &job.remote[pair.1 as usize]);
        let posted = if listed {
            endpoint.put_list(local, remote, spans, &job.tally)
        } else {
            endpoint.post(way, local, remote, spans, &job.tally)
        };
        if let Err(error) = posted {
            job.work.fail(error);
            return Err(Halt::Work);
        }
        job.bytes += spans.iter().map(|span| span.len).sum::<u64>();
        job.runs += spans.len() as u64;
        spans.clear();
        Ok(())
    }
}
