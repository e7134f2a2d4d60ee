//! Writing one large item into the receiver's memory: straight from the tensor where its runs are long enough, else
//! through two small buffers, one being filled while the other is sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pdkv_core::Result;
use pdkv_core::span::Span;
use pdkv_device::{HostRegion, HugePages};

use super::queue::Large;
use super::sender::Outgoing;
use crate::post::{Order, Table, post};
use crate::remote::RemoteRegion;
use crate::transfer::Transfer;
use crate::transport::Direction;

/// Runs shorter than this are put together first: a span costs every transport more than copying so few bytes.
const MIN_RUN: u64 = 512;
/// Spans of one transfer.
const MAX_SPANS: u64 = 16 << 10;
/// Bytes of one staging buffer.
const STAGE: u64 = 4 << 20;
/// How long one look at the pipe's end may be delayed.
const SLICE: Duration = Duration::from_millis(50);

/// What writing an item came to.
pub(super) struct Written {
    /// Bytes that were put together on the way.
    pub(super) staged: u64,
}

/// The staging buffers, made when they are first needed.
#[derive(Default)]
pub(super) struct Source {
    stages: Vec<Arc<HostRegion>>,
}

/// One transfer under way.
struct Running(Transfer);

impl Running {
    /// Waits until it has ended and touches no memory; cancels it when the pipe ends first.
    fn end(self, core: &Outgoing) -> Result<u64> {
        while !self.0.wait_quiesced(Some(SLICE)) {
            if core.queue.failure().is_some() {
                self.0.cancel();
            }
        }
        // Quiesced is set after the outcome.
        match self.0.error() {
            Some(error) => Err(core.queue.failure().unwrap_or(error)),
            None => Ok(self.0.stats().staged_bytes),
        }
    }
}

impl Source {
    /// Writes the item to `offset` of `region`. When this returns, nothing touches either memory.
    pub(super) fn write(
        &mut self,
        core: &Outgoing,
        large: &Large,
        region: &Arc<RemoteRegion>,
        offset: u64,
    ) -> Result<Written> {
        let at = &large.at;
        let mut staged = 0;
        if at.is_dense() {
            let span = Span::new(0, 0, at.nbytes());
            staged = start(core, &large.memory, vec![span], region, offset)?.end(core)?;
        } else if at.run_bytes() >= MIN_RUN {
            let mut first = 0;
            while first < at.runs() {
                let len = at.run_bytes();
                let spans: Vec<Span> = at
                    .offsets(first)
                    .take(MAX_SPANS as usize)
                    .map(|from| Span::new(0, from, len))
                    .collect();
                let count = spans.len() as u64;
                staged += start(core, &large.memory, spans, region, offset + first * len)?.end(core)?;
                first += count;
            }
        } else {
            self.gather(core, large, region, offset)?;
            staged = at.nbytes();
        }
        Ok(Written { staged })
    }

    fn gather(&mut self, core: &Outgoing, large: &Large, region: &Arc<RemoteRegion>, offset: u64) -> Result<()> {
        while self.stages.len() < 2 {
            self.stages.push(HostRegion::allocate(STAGE, HugePages::Never)?);
        }
        let at = &large.at;
        let per_stage = STAGE / at.run_bytes();
        let mut before: Option<Running> = None;
        let mut first = 0;
        let mut failure = None;
        while first < at.runs() && failure.is_none() {
            let count = per_stage.min(at.runs() - first);
            let stage = &self.stages[(first / per_stage % 2) as usize];
            let len = count * at.run_bytes();
            let begun = pdkv_device::gather(stage, 0, &large.memory, at, first, count).and_then(|()| {
                let span = vec![Span::new(0, 0, len)];
                start(core, stage, span, region, offset + first * at.run_bytes())
            });
            // The one before goes on while this stage is filled, and must be out of its own before that is filled.
            let ended = before.take().map_or(Ok(0), |running| running.end(core));
            match (begun, ended) {
                (Ok(running), Ok(_)) => before = Some(running),
                (Ok(running), Err(error)) => {
                    running.0.cancel();
                    let _ = running.end(core);
                    failure = Some(error);
                }
                (Err(error), _) => failure = Some(error),
            }
            first += count;
        }
        let ended = before.map_or(Ok(0), |running| running.end(core));
        failure.map_or(ended.map(drop), Err)
    }
}

/// Starts writing spans of `memory` to where they follow one another in `region`.
fn start(
    core: &Outgoing,
    memory: &Arc<HostRegion>,
    spans: Vec<Span>,
    region: &Arc<RemoteRegion>,
    offset: u64,
) -> Result<Running> {
    let mut end = offset;
    let there = spans
        .iter()
        .map(|span| {
            let start = end;
            end += span.len;
            Span::new(0, start, span.len)
        })
        .collect();
    let order = Order {
        direction: Direction::Write,
        require: None,
        timeout: Duration::MAX,
        notify: None,
        after: None,
        posted: Instant::now(),
    };
    let here = Table {
        regions: vec![Arc::clone(memory).into()],
        spans,
    };
    let there = Table {
        regions: vec![Arc::clone(region)],
        spans: there,
    };
    let transfer = post(&core.shared, &core.link, &order, here, there)?;
    *core.path.lock().expect("no holder panics") = Some(transfer.path().clone());
    Ok(Running(transfer))
}
