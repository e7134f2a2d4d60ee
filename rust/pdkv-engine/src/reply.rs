//! An answer on the local socket as it is read: in pieces, each with the descriptors that ride beside it, and all of it within a time. What
//! counts is how long the peer is waited for, not how long we take to map what it names.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};

use crate::dial::STREAM_FULL;
use crate::local::{FDS, broken, refuse, turned_away};

/// How long an answer may be waited for in all.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one look at the socket takes at most.
const SLICE: Duration = Duration::from_millis(50);

/// An answer that is being read.
pub(crate) struct Reply<'a> {
    stream: UnixStream,
    left: Duration,
    stopped: &'a dyn Fn() -> bool,
    /// The peer is lost.
    gone: Arc<AtomicBool>,
    /// Bytes that have come.
    heard: usize,
    /// What came first is the word that turns one away, if it is all.
    full: bool,
}

impl<'a> Reply<'a> {
    pub(crate) fn new(stream: UnixStream, stopped: &'a dyn Fn() -> bool, gone: Arc<AtomicBool>) -> Self {
        Self {
            stream,
            left: PATIENCE,
            stopped,
            gone,
            heard: 0,
            full: false,
        }
    }

    /// Whether the peer turns us away, as far as it has spoken. In an answer that begins with such a byte more must have come before that is known.
    pub(crate) fn is_full(&self) -> bool {
        self.full && self.heard == 1
    }

    /// What comes from now on may be waited for so much longer: the peer has shown that it is at work.
    pub(crate) fn bear_with(&mut self, more: Duration) {
        self.left += more;
    }

    /// The next piece, and the descriptors that came with it: into `bytes`, one at least.
    ///
    /// # Errors
    /// `TransferCancelled` when told to stop, `PeerLost` when the time is over or the peer is gone, `Handshake` for too many descriptors, `Capacity` when
    /// it turned us away.
    pub(crate) fn piece(&mut self, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>)> {
        loop {
            if (self.stopped)() {
                let text = "stopped while mapping";
                return Err(Error::new(ErrorKind::TransferCancelled, "local socket", text));
            }
            let gone = self.gone.load(Ordering::Acquire);
            if gone || self.left.is_zero() {
                let slow = "the peer was too slow in handing out its memory";
                let text = if gone { "the peer is lost" } else { slow };
                return Err(Error::new(ErrorKind::PeerLost, "local socket", text));
            }
            let asked = Instant::now();
            self.stream
                .set_read_timeout(Some(self.left.min(SLICE)))
                .map_err(broken)?;
            let piece = pdkv_device::recv_fds(self.stream.as_fd(), bytes, FDS)
                .map_err(|error| if self.is_full() { turned_away() } else { error })?;
            // A thread that had no processor meanwhile has not been kept waiting by the peer.
            self.left = self.left.saturating_sub(asked.elapsed().min(SLICE * 2));
            if let Some((count, fds)) = piece {
                self.full |= self.heard == 0 && fds.is_empty() && bytes[0] == STREAM_FULL;
                self.heard += count;
                return Ok((count, fds));
            }
        }
    }

    /// Fills `bytes`; returns the descriptors that came with them.
    ///
    /// # Errors
    /// As [`piece`](Self::piece).
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) -> Result<Vec<OwnedFd>> {
        let (mut have, mut fds) = (0, Vec::new());
        while have < bytes.len() {
            let (count, more) = self.piece(&mut bytes[have..])?;
            have += count;
            fds.extend(more);
            if fds.len() > FDS {
                return Err(refuse("more descriptors came than were announced"));
            }
        }
        Ok(fds)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::Write;

    use super::*;

    #[test]
    fn an_answer_that_drips_ends_however_long_it_is() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let _ = theirs.write_all(&[0]);
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let mut reply = Reply::new(ours, &|| false, Arc::default());
            reply.left = Duration::from_millis(200);
            // Each byte in time, all of them in a quarter of an hour.
            let error = reply.fill(&mut vec![0; 200_000]).map(drop).unwrap_err();
            over.store(true, Ordering::Relaxed);
            assert_eq!(error.kind(), ErrorKind::PeerLost);
            assert!(error.message().contains("too slow"), "{error}");
        });
    }

    #[test]
    fn a_reader_that_is_told_to_stop_stops_and_time_of_ours_is_not_counted() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let looks = Cell::new(0);
        let stopped = || {
            looks.set(looks.get() + 1);
            looks.get() > 2
        };
        let mut reply = Reply::new(ours, &stopped, Arc::default());
        reply.left = Duration::from_secs(1);
        theirs.write_all(b"ab").unwrap();
        let mut byte = [0];
        assert_eq!(reply.piece(&mut byte).unwrap().0, 1);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(reply.piece(&mut byte).unwrap().0, 1);
        assert!(reply.left > Duration::from_millis(700), "{:?} is left", reply.left);
        reply.bear_with(Duration::from_secs(9));
        assert!(reply.left > Duration::from_secs(9));
        let error = reply.piece(&mut byte).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TransferCancelled);
    }

    #[test]
    fn a_word_that_turns_one_away_is_all_that_comes() {
        let fill = |sent: &[u8]| {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(sent).unwrap();
            drop(theirs);
            let mut reply = Reply::new(ours, &|| false, Arc::default());
            reply.fill(&mut [0; 24]).map(drop)
        };
        assert_eq!(fill(&[STREAM_FULL]).unwrap_err().kind(), ErrorKind::Capacity);
        // An answer may begin so, and break off.
        assert_eq!(fill(&[STREAM_FULL; 2]).unwrap_err().kind(), ErrorKind::PeerLost);
        assert!(fill(&[STREAM_FULL; 24]).is_ok());
    }
}
