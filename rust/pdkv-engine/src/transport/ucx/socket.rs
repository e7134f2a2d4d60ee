//! A lane's side channel: frames in and out without blocking, because the thread that reads it has a
//! worker to drive.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use super::codec::{Frame, HEADER};

/// What may wait for a peer that reads slowly; past it nothing more is taken from that peer, so that
/// it can't make us answer into our own memory for ever.
const MAX_PENDING: usize = 1 << 20;
/// Bytes read at once.
const GULP: usize = 16 << 10;

/// One end of the side channel.
pub(super) struct LaneSocket {
    stream: Arc<TcpStream>,
    input: Vec<u8>,
    /// Bytes of `input` that are used up.
    used: usize,
    /// What one read goes into.
    gulp: Box<[u8]>,
    output: Vec<u8>,
    sent: usize,
}

impl LaneSocket {
    /// Takes a connected stream.
    ///
    /// # Errors
    /// `PeerLost` when the system won't have it non-blocking.
    pub(super) fn new(stream: Arc<TcpStream>) -> Result<Self> {
        stream.set_nonblocking(true).map_err(broken)?;
        Ok(Self {
            stream,
            input: Vec::new(),
            used: 0,
            gulp: vec![0; GULP].into_boxed_slice(),
            output: Vec::new(),
            sent: 0,
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether [`receive`](Self::receive) would read at all.
    pub(super) fn listens(&self) -> bool {
        self.output.len() - self.sent <= MAX_PENDING
    }

    /// Whether something waits for the peer to read.
    pub(super) fn blocked(&self) -> bool {
        self.sent < self.output.len()
    }

    /// Sends a frame, or keeps what the system doesn't take now.
    ///
    /// # Errors
    /// `PeerLost`.
    pub(super) fn send(&mut self, frame: &Frame) -> Result<()> {
        frame.encode(&mut self.output);
        self.flush()
    }

    /// Sends what is kept, as far as the system takes it.
    ///
    /// # Errors
    /// `PeerLost`.
    pub(super) fn flush(&mut self) -> Result<()> {
        while self.blocked() {
            match (&*self.stream).write(&self.output[self.sent..]) {
                Ok(0) => return Err(gone()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == IoKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) => return Err(broken(error)),
            }
        }
        self.output.clear();
        self.sent = 0;
        Ok(())
    }

    /// The next frame, if it is here.
    ///
    /// # Errors
    /// `PeerLost` at the end of the stream, `Integrity` for garbage.
    pub(super) fn receive(&mut self) -> Result<Option<Frame>> {
        if !self.listens() {
            return Ok(None);
        }
        loop {
            if let Some(frame) = self.parse()? {
                return Ok(Some(frame));
            }
            if self.used > 0 {
                self.input.drain(..self.used);
                self.used = 0;
            }
            match (&*self.stream).read(&mut self.gulp) {
                Ok(0) => return Err(gone()),
                Ok(count) => self.input.extend_from_slice(&self.gulp[..count]),
                Err(error) if error.kind() == IoKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) => return Err(broken(error)),
            }
        }
    }

    fn parse(&mut self) -> Result<Option<Frame>> {
        let Some(header) = self.input[self.used..].first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let (kind, len) = Frame::header(header)?;
        let start = self.used + HEADER;
        let Some(body) = self.input.get(start..start + len) else {
            return Ok(None);
        };
        let frame = Frame::body(kind, body)?;
        self.used = start + len;
        Ok(Some(frame))
    }
}

impl Drop for LaneSocket {
    fn drop(&mut self) {
        // Others may hold the stream too; the peer is to learn of the end now.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::PeerLost, "lane", "the peer ended the lane")
}

fn broken(error: std::io::Error) -> Error {
    Error::new(ErrorKind::PeerLost, "lane", "the lane's side channel broke").with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (LaneSocket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (LaneSocket::new(Arc::new(ours)).unwrap(), listener.accept().unwrap().0)
    }

    fn next(socket: &mut LaneSocket) -> Result<Frame> {
        loop {
            if let Some(frame) = socket.receive()? {
                return Ok(frame);
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn frames_come_whole_however_they_are_cut() {
        let (mut ours, mut theirs) = pair();
        let mut raw = Vec::new();
        let frames = [Frame::Go { id: 1 }, Frame::Ready, Frame::Never { id: 2 }];
        for frame in &frames {
            frame.encode(&mut raw);
        }
        for byte in raw {
            theirs.write_all(&[byte]).unwrap();
        }
        for frame in &frames {
            assert_eq!(&next(&mut ours).unwrap(), frame);
        }
        drop(theirs);
        assert_eq!(next(&mut ours).unwrap_err().kind(), ErrorKind::PeerLost);
    }

    #[test]
    fn garbage_and_halves_are_errors() {
        let (mut ours, mut theirs) = pair();
        theirs.write_all(&[0xEE; 64]).unwrap();
        assert_eq!(next(&mut ours).unwrap_err().kind(), ErrorKind::Integrity);
        let (mut ours, mut theirs) = pair();
        let mut raw = Vec::new();
        Frame::Go { id: 1 }.encode(&mut raw);
        theirs.write_all(&raw[..HEADER + 3]).unwrap();
        drop(theirs);
        assert_eq!(next(&mut ours).unwrap_err().kind(), ErrorKind::PeerLost);
    }

    #[test]
    fn a_peer_that_asks_and_never_reads_is_heard_no_more() {
        let (mut ours, mut theirs) = pair();
        let key = Frame::Key {
            region: pdkv_core::id::RegionId(1),
            base: 0,
            len: 1,
            key: vec![1; 60 << 10],
        };
        while ours.output.len() - ours.sent <= MAX_PENDING {
            ours.send(&key).unwrap();
        }
        let mut raw = Vec::new();
        Frame::Go { id: 1 }.encode(&mut raw);
        theirs.write_all(&raw).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(ours.receive().unwrap(), None);
        let reader = std::thread::spawn(move || {
            let mut scrap = vec![0; 1 << 20];
            while theirs.read(&mut scrap).unwrap() > 0 {}
        });
        while ours.blocked() {
            ours.flush().unwrap();
        }
        assert_eq!(next(&mut ours).unwrap(), Frame::Go { id: 1 });
        drop(ours);
        reader.join().unwrap();
    }
}
