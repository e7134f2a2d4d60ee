//! What an owner may answer to an empty read, and what is made of it.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

const WANTED: [(RegionId, u64); 2] = [(RegionId(5), 64), (RegionId(6), 64)];

/// Told the number of the stream and the ids that are asked about.
type Answer = dyn Fn(usize, &[u64], &mut UnixStream) + Send + Sync;

/// An owner that answers the questions it is asked, on each of its streams.
struct Owner {
    opened: Arc<AtomicUsize>,
    answer: Arc<Answer>,
}

impl Owner {
    fn look(answer: impl Fn(usize, &[u64], &mut UnixStream) + Send + Sync + 'static) -> (FarLook, Arc<AtomicUsize>) {
        let opened = Arc::new(AtomicUsize::new(0));
        let owner = Self {
            opened: Arc::clone(&opened),
            answer: Arc::new(answer),
        };
        (FarLook::new(Box::new(owner)), opened)
    }
}

impl Dial for Owner {
    fn open(&self, _stop: &dyn Stop) -> Result<Socket> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let answer = Arc::clone(&self.answer);
        std::thread::spawn(move || {
            let mut head = [0; Request::SIZE];
            while theirs.read_exact(&mut head).is_ok() {
                let request = Request::decode(&head).unwrap();
                assert_eq!((request.verb, request.bytes), (Verb::Get, 0));
                let Target::Spans { count } = request.target else {
                    panic!("{request:?}")
                };
                let mut spans = vec![0; count as usize * WireSpan::SIZE];
                theirs.read_exact(&mut spans).unwrap();
                let spans: Vec<_> = spans.chunks_exact(WireSpan::SIZE).map(WireSpan::decode).collect();
                assert!(spans.iter().all(|span| (span.offset, span.len) == (0, 0)));
                let ids: Vec<_> = spans.iter().map(|span| span.region.0).collect();
                answer(number, &ids, &mut theirs);
            }
        });
        Socket::new(OwnedFd::from(ours))
    }
}

fn say(stream: &mut UnixStream, code: u16, text: &str, bytes: u64) {
    let response = Response {
        code,
        message_len: text.len() as u16,
        bytes,
    };
    stream.write_all(&response.encode()).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
}

/// What comes of asking: of all of it, and of each region.
fn ask(look: &FarLook) -> (Option<ErrorKind>, Vec<(u64, ErrorKind)>) {
    let mut gone = Vec::new();
    let asked = look.still_there(&WANTED, &|| false, &mut |id, error| gone.push((id.0, error.kind())));
    (asked.err().map(|error| error.kind()), gone)
}

#[test]
fn the_regions_are_asked_about_together_on_one_stream_and_apart_where_something_is_amiss() {
    let (look, opened) = Owner::look(|_, ids, stream| match ids {
        [6] => say(stream, ErrorKind::Region as u16, "moved", 0),
        ids if ids.len() > 1 && ids.contains(&6) => say(stream, ErrorKind::Region as u16, "moved", 0),
        _ => say(stream, 0, "", 0),
    });
    assert_eq!(ask(&look), (None, vec![(6, ErrorKind::Region)]));
    assert_eq!(ask(&look), (None, vec![(6, ErrorKind::Region)]));
    assert_eq!(opened.load(Ordering::Relaxed), 1);
    look.shut_down();
    ask(&look);
    // One for each of its three questions: none is kept to a peer that is lost.
    assert_eq!(opened.load(Ordering::Relaxed), 1 + 3);
}

#[test]
fn an_owner_that_cannot_tell_is_not_one_whose_memory_has_moved() {
    let (look, _) = Owner::look(|_, _, stream| say(stream, ErrorKind::Device as u16, "no driver", 0));
    let both = vec![(5, ErrorKind::Transfer), (6, ErrorKind::Transfer)];
    assert_eq!(ask(&look), (None, both));
}

#[test]
fn a_stream_that_was_forgotten_meanwhile_costs_no_transfer() {
    let (look, opened) = Owner::look(|number, ids, stream| {
        say(stream, 0, "", 0);
        if number == 0 && !ids.is_empty() {
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        }
    });
    assert_eq!(ask(&look), (None, Vec::new()));
    assert_eq!(ask(&look), (None, Vec::new()));
    assert_eq!(opened.load(Ordering::Relaxed), 2);
}

#[test]
fn whatever_is_answered_but_yes_is_no() {
    type Says = fn(&mut UnixStream);
    let cases: [(&str, Says, ErrorKind); 4] = [
        (
            "garbage",
            |stream| stream.write_all(&[0xFF; 64]).unwrap(),
            ErrorKind::Integrity,
        ),
        ("bytes", |stream| say(stream, 0, "", 4), ErrorKind::Integrity),
        (
            "half a word",
            |stream| stream.write_all(&[0x50, 0x4B]).unwrap(),
            ErrorKind::PeerLost,
        ),
        ("a close", |_| {}, ErrorKind::PeerLost),
    ];
    for (what, says, kind) in cases {
        let (look, _) = Owner::look(move |_, _, stream| {
            says(stream);
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        });
        assert_eq!(ask(&look), (Some(kind), Vec::new()), "{what}");
    }
}

#[test]
fn an_owner_that_says_nothing_is_left_when_nobody_wants_to_know_any_more() {
    let (look, _) = Owner::look(|_, _, _| {});
    let looks = std::cell::Cell::new(0);
    let stopped = || {
        looks.set(looks.get() + 1);
        looks.get() > 3
    };
    let error = look.still_there(&WANTED, &stopped, &mut |_, _| {}).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransferCancelled);
}
