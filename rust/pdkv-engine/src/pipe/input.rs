//! What a receiver has read of its stream, and the item it is in the middle of. Owned by one thread at a time.

use std::io::{ErrorKind as IoKind, Read};
use std::net::TcpStream;

use pdkv_core::pipe::{ItemHead, MAX_FRAME, ToReceiver};
use pdkv_core::{Error, ErrorKind, Result, Retry};

use super::buffer::PipeBuffer;
use super::landing::{Slab, Slabs};
use super::receiver::PipeItem;
use super::{closed_there, misplaced};

/// Bytes read at once, and all that is read ahead.
const BUFFER: usize = 256 << 10;
const _: () = assert!(BUFFER >= MAX_FRAME, "every frame must fit");

/// A large item on its way.
pub(super) struct Landing {
    pub(super) seq: u64,
    item: PipeItem,
    pub(super) nbytes: u64,
    /// Where it comes, once there is memory for it.
    pub(super) slab: Option<Slab>,
}

/// What to do next.
pub(super) enum Step {
    /// An item is whole.
    Item(PipeItem, Counted),
    /// The landing wants a slab.
    Place,
    /// Read on.
    More,
}

/// How the bytes of an item came.
pub(super) enum Counted {
    Inline(u64),
    Placed(u64),
}

pub(super) struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The next item's number.
    next: u64,
    max_item_bytes: u64,
    pub(super) landing: Option<Landing>,
    /// Why nothing comes any more, once that is certain.
    pub(super) done: Option<Error>,
}

/// What one read came to.
pub(super) enum Gulp {
    Some,
    Nothing,
    End,
}

impl Input {
    pub(super) fn new(max_item_bytes: u64) -> Self {
        Self {
            buffer: vec![0; BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            next: 0,
            max_item_bytes,
            landing: None,
            done: None,
        }
    }

    /// Items that were handed out.
    pub(super) fn count(&self) -> u64 {
        self.next
    }

    /// Whether nothing is read ahead.
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Reads what the stream has now, as far as there is room: which there is, unless a whole frame waits.
    pub(super) fn read(&mut self, mut stream: &TcpStream) -> std::io::Result<Gulp> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        loop {
            return match stream.read(&mut self.buffer[self.end..]) {
                Ok(0) => Ok(Gulp::End),
                Ok(count) => {
                    self.end += count;
                    Ok(Gulp::Some)
                }
                Err(error) if error.kind() == IoKind::WouldBlock => Ok(Gulp::Nothing),
                Err(error) if error.kind() == IoKind::Interrupted => continue,
                Err(error) => Err(error),
            };
        }
    }

    /// Takes the next frame in, if it is here.
    ///
    /// # Errors
    /// What ends the pipe: garbage, a frame at the wrong time, the sender's failure, its goodbye.
    pub(super) fn step(&mut self, slabs: &std::sync::Arc<Slabs>) -> Result<Step> {
        if self.landing.as_ref().is_some_and(|landing| landing.slab.is_none()) {
            return Ok(Step::Place);
        }
        let Some((frame, used)) = ToReceiver::decode(&self.buffer[self.start..self.end])? else {
            return Ok(Step::More);
        };
        let step = match (frame, &mut self.landing) {
            (ToReceiver::Item { head, inline }, landing @ None) => {
                if head.seq != self.next {
                    let text = format!("item `{}` came where `{}` was due", head.seq, self.next);
                    return Err(Error::new(ErrorKind::Integrity, "pipe", text));
                }
                let nbytes = head.tensor.map_or(0, |tensor| tensor.nbytes);
                if nbytes > self.max_item_bytes {
                    let text = format!(
                        "an item of `{nbytes}` bytes, at most `{}` are taken",
                        self.max_item_bytes
                    );
                    return Err(Error::new(ErrorKind::Capacity, "recv", text).with_retry(Retry::Never));
                }
                let mut item = describe(&head);
                match inline {
                    None if head.tensor.is_some() => {
                        *landing = Some(Landing {
                            seq: head.seq,
                            item,
                            nbytes,
                            slab: None,
                        });
                        Step::Place
                    }
                    _ => {
                        item.bytes = inline.map(PipeBuffer::small);
                        self.next += 1;
                        Step::Item(item, Counted::Inline(nbytes))
                    }
                }
            }
            (ToReceiver::Placed { seq }, landing) => {
                let landed = landing.take_if(|landing| landing.seq == seq);
                let Some(Landing {
                    mut item,
                    nbytes,
                    slab: Some(slab),
                    ..
                }) = landed
                else {
                    return Err(misplaced(frame.name()));
                };
                item.bytes = Some(PipeBuffer::landed(slabs.lend(slab, nbytes)));
                self.next += 1;
                Step::Item(item, Counted::Placed(nbytes))
            }
            (ToReceiver::Failed { kind, reason }, landing) => {
                // The sender's last word: it writes nowhere any more.
                if let Some(slab) = landing.take().and_then(|landing| landing.slab) {
                    slabs.give_back(slab);
                }
                let text = format!("the sender ended the pipe: {reason}");
                return Err(Error::new(kind, "pipe", text));
            }
            (ToReceiver::Bye { items }, None) if items == self.next => {
                return Err(closed_there(
                    "recv",
                    "the sender has closed the pipe and everything was received",
                ));
            }
            (frame, _) => return Err(misplaced(frame.name())),
        };
        self.start += used;
        Ok(step)
    }
}

fn describe(head: &ItemHead<'_>) -> PipeItem {
    PipeItem {
        tag: head.tag.to_vec(),
        dtype: head.tensor.map(|tensor| tensor.dtype.to_owned()),
        shape: head.tensor.map_or_else(Vec::new, |tensor| tensor.shape().collect()),
        bytes: None,
    }
}
