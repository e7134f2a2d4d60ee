//! As [`look`](crate::look), of a peer on another host: an empty read of the regions on a data stream, which their owner grants or refuses as it does any
//! other, once it has looked whether they are still there. One stream is kept for the next question.

use std::sync::{Mutex, MutexGuard};

use pdkv_core::id::RegionId;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Stop;

use crate::look::{replaced, untold};
use crate::transport::request::{MAX_SPANS, Request, Target, Verb, WireSpan};
use crate::transport::tcp::{Dial, Response, Socket};

/// How a peer is asked by streams.
pub(crate) struct FarLook {
    dial: Box<dyn Dial>,
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    stream: Option<Socket>,
    closed: bool,
}

/// Ends the wait for an answer.
struct Unwanted<'a>(&'a dyn Fn() -> bool);

impl Stop for Unwanted<'_> {
    fn stopped(&self) -> bool {
        (self.0)()
    }
}

impl FarLook {
    pub(crate) fn new(dial: Box<dyn Dial>) -> Self {
        Self {
            dial,
            idle: Mutex::default(),
        }
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().expect("no holder panics")
    }

    /// Closes the stream that is kept; none is kept any more.
    pub(crate) fn shut_down(&self) {
        let mut idle = self.idle();
        idle.closed = true;
        idle.stream = None;
    }

    pub(crate) fn still_there(
        &self,
        wanted: &[(RegionId, u64)],
        stopped: &dyn Fn() -> bool,
        gone: &mut dyn FnMut(RegionId, Error),
    ) -> Result<()> {
        let stop = Unwanted(stopped);
        for some in wanted.chunks(MAX_SPANS) {
            if self.ask(some, &stop)?.is_none() {
                continue;
            }
            // One by one only where something is amiss.
            for one in some {
                if let Some(refusal) = self.ask(std::slice::from_ref(one), &stop)? {
                    gone(one.0, judge(one.0, &refusal));
                }
            }
        }
        Ok(())
    }

    /// What the owner says against an empty read of these regions.
    fn ask(&self, regions: &[(RegionId, u64)], stop: &dyn Stop) -> Result<Option<Error>> {
        let kept = self.idle().stream.take().filter(|stream| !stream.is_gone());
        // One that has rested may be forgotten on the way, which says nothing of the peer.
        if let Some(stream) = kept
            && let Ok(said) = exchange(&stream, regions, stop)
        {
            self.keep(stream);
            return Ok(said);
        }
        let stream = self.dial.open(stop)?;
        let said = exchange(&stream, regions, stop)?;
        self.keep(stream);
        Ok(said)
    }

    /// After a whole answer, that is, and not in the middle of one.
    fn keep(&self, stream: Socket) {
        let mut idle = self.idle();
        if !idle.closed {
            idle.stream = Some(stream);
        }
    }
}

fn exchange(stream: &Socket, regions: &[(RegionId, u64)], stop: &dyn Stop) -> Result<Option<Error>> {
    let target = Target::Spans {
        count: regions.len() as u32,
    };
    let request = Request {
        verb: Verb::Get,
        target,
        bytes: 0,
    };
    let mut question = request.encode().to_vec();
    for (region, _) in regions {
        let nothing = WireSpan {
            region: *region,
            offset: 0,
            len: 0,
        };
        nothing.encode(&mut question);
    }
    stream.write_all(&question, stop)?;
    let mut answer = [0; Response::SIZE];
    stream.read_exact(&mut answer, stop)?;
    let answer = Response::decode(&answer)?;
    let refusal = answer.refusal(stream, stop)?;
    if refusal.is_none() && answer.bytes > 0 {
        let text = format!("the peer has `{}` bytes for an empty read", answer.bytes);
        return Err(Error::new(ErrorKind::Integrity, "fence", text));
    }
    Ok(refusal)
}

/// What a refusal says of a region.
fn judge(id: RegionId, refusal: &Error) -> Error {
    match refusal.kind() {
        ErrorKind::Region => replaced(id, refusal.message()),
        _ => untold(id, refusal.message()),
    }
}

#[cfg(test)]
#[path = "far_look_tests.rs"]
mod tests;
