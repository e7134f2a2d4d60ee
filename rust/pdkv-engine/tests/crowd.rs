//! More transfers at once than an owner lets a peer have streams: they share those that there are, and all of them end as they should.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{BLOCKS, LEASE, Memory, WAIT, cache_of, engine, table};
use pdkv_core::ErrorKind;
use pdkv_engine::{Engine, Export, KvCache, Peer, PullOptions, Transfer, TransportKind};

/// So many bytes for each token and head that a pull of everything is several turns, so that it asks for several streams.
const WIDE: u64 = 4 << 10;
/// Streams of a link.
const MOST: usize = 64;
/// What an owner answers to a stream's hello.
const READY: u8 = 0xA5;
const FULL: u8 = 0x5A;

/// What somebody between the two engines does with data streams.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Lets through so many at once; says of any other that there is no room.
    Room(usize),
    /// The same, as releases did that had no word for it.
    Ends(usize),
    /// Lets them come to be, and then nothing more of what the owner says.
    Stalls,
    /// Ends each that is used.
    Forgets,
}

/// Stands between a consumer and a producer.
struct Between {
    way: Mutex<Way>,
    owner: String,
    open: AtomicUsize,
    turned_away: AtomicUsize,
}

impl Between {
    fn start(owner: &str, way: Way) -> (String, Arc<Self>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("bound").to_string();
        let between = Arc::new(Self {
            way: Mutex::new(way),
            owner: owner.to_owned(),
            open: AtomicUsize::new(0),
            turned_away: AtomicUsize::new(0),
        });
        let mine = Arc::clone(&between);
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let (mine, stream) = (Arc::clone(&mine), stream.expect("a connection"));
                std::thread::spawn(move || mine.stand(stream, number > 0));
            }
        });
        (address, between)
    }

    fn way(&self) -> Way {
        *self.way.lock().unwrap()
    }

    fn stand(self: Arc<Self>, mut stream: TcpStream, is_data: bool) {
        let refusal = match self.way() {
            Way::Room(most) => Some((most, FULL)),
            Way::Ends(most) => Some((most, READY)),
            _ => None,
        };
        if is_data
            && let Some((most, word)) = refusal
            && self.open.load(Ordering::SeqCst) >= most
        {
            self.turned_away.fetch_add(1, Ordering::SeqCst);
            let mut hello = [0; 256];
            let _ = stream.read(&mut hello).and_then(|_| stream.write_all(&[word]));
            return;
        }
        self.open.fetch_add(usize::from(is_data), Ordering::SeqCst);
        let owner = TcpStream::connect(&self.owner).expect("the producer listens");
        let ends = [stream.try_clone().unwrap(), owner.try_clone().unwrap()];
        let (mine, ours) = (Arc::clone(&self), ends);
        let back = std::thread::spawn(move || {
            let [stream, owner] = ours;
            let mut first = true;
            mine.pass(&owner, &stream, || {
                !(is_data && mine.way() == Way::Stalls && !std::mem::take(&mut first))
            });
        });
        // One that is new when streams are forgotten is as good as any.
        let is_old = self.way() != Way::Forgets;
        let mut asked = 0;
        self.pass(&stream, &owner, || {
            // The first is the hello.
            asked += 1;
            !(is_data && is_old && self.way() == Way::Forgets && asked > 1)
        });
        back.join().expect("passes on");
        self.open.fetch_sub(usize::from(is_data), Ordering::SeqCst);
    }

    /// Passes on what comes until either end is gone, or it is not to go on.
    fn pass(&self, mut from: &TcpStream, mut to: &TcpStream, mut goes_on: impl FnMut() -> bool) {
        let mut buffer = vec![0; 256 << 10];
        while let Ok(count) = from.read(&mut buffer) {
            if count == 0 {
                break;
            }
            if !goes_on() {
                if self.way() == Way::Stalls {
                    // Until the other side has had enough of it.
                    let _ = to.read(&mut [0]);
                }
                break;
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
}

struct Scene {
    producer: Engine,
    consumer: Engine,
    source: KvCache,
    target: KvCache,
    peer: Peer,
    export: Export,
    between: Option<Arc<Between>>,
}

/// What every byte of the source is made of.
fn pattern(len: u64) -> Vec<u8> {
    (0..len).map(|at| common::byte(1, 0, 0, at)).collect()
}

impl Scene {
    fn new(name: &str, pulls: u32, way: Option<Way>) -> Self {
        let (producer, consumer) = (
            engine("producer", &[TransportKind::Tcp]),
            engine(name, &[TransportKind::Tcp]),
        );
        let source = cache_of(&producer, Memory::Private, WIDE);
        let target = cache_of(&consumer, Memory::Private, WIDE);
        for memory in source.memory() {
            memory.write_at(0, &pattern(memory.len())).unwrap();
        }
        let owner = producer.address().unwrap();
        let (address, between) = match way {
            Some(way) => {
                let (address, between) = Between::start(owner, way);
                (address, Some(between))
            }
            None => (owner.to_owned(), None),
        };
        let peer = consumer.connect(&address, Duration::from_secs(30)).unwrap();
        let all: Vec<_> = (0..BLOCKS).collect();
        let export = source.export(table(&all), 4, b"", pulls, LEASE * 10).unwrap();
        Self {
            producer,
            consumer,
            source,
            target,
            peer,
            export,
            between,
        }
    }

    fn pull(&self, timeout: Duration) -> Transfer {
        let all: Vec<_> = (0..BLOCKS).collect();
        let options = PullOptions {
            timeout,
            ..PullOptions::default()
        };
        self.target
            .pull(self.export.reference(), table(&all), &options)
            .unwrap()
    }

    fn check(&self) {
        for memory in self.target.memory() {
            let mut bytes = vec![0; memory.len() as usize];
            memory.read_at(0, &mut bytes).unwrap();
            assert!(bytes == pattern(memory.len()), "other bytes than the producer's");
        }
        assert!(self.peer.alive());
    }

    fn between(&self) -> &Between {
        self.between.as_ref().expect("somebody stands between")
    }
}

const LONG: Duration = Duration::from_secs(500);

/// Threads of this process of that name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|comm| comm.trim_end() == name)
        .count()
}

#[test]
fn a_hundred_pulls_at_once_are_all_done() {
    let scene = Scene::new("hundred", 100, None);
    let transfers: Vec<_> = (0..100).map(|_| scene.pull(LONG)).collect();
    for transfer in &transfers {
        transfer.wait(Some(LONG)).unwrap();
    }
    scene.check();
}

#[test]
fn an_owner_with_room_for_two_streams_serves_everybody_by_them() {
    for way in [Way::Room(2), Way::Ends(2)] {
        let scene = Scene::new("two", 30, Some(way));
        let transfers: Vec<_> = (0..30).map(|_| scene.pull(LONG)).collect();
        for transfer in &transfers {
            transfer.wait(Some(LONG)).unwrap();
        }
        scene.check();
        assert!(scene.between().turned_away.load(Ordering::SeqCst) > 0, "nobody was");
    }
}

#[test]
fn an_owner_that_takes_no_stream_fails_the_transfer_and_says_why() {
    for (way, kind) in [(Way::Room(0), ErrorKind::Capacity), (Way::Ends(0), ErrorKind::PeerLost)] {
        let scene = Scene::new("none", 1, Some(way));
        let transfer = scene.pull(LONG);
        let error = transfer.wait(Some(LONG)).unwrap_err();
        assert_eq!(error.kind(), kind, "{error:?}");
        assert!(transfer.wait_quiesced(WAIT));
        assert!(scene.peer.alive());
        // It has room again, and the link is as good as it was.
        *scene.between().way.lock().unwrap() = Way::Room(2);
        let export = {
            let all: Vec<_> = (0..BLOCKS).collect();
            scene.source.export(table(&all), 4, b"", 1, LEASE * 10).unwrap()
        };
        let all: Vec<_> = (0..BLOCKS).collect();
        let again = scene
            .target
            .pull(export.reference(), table(&all), &PullOptions::default())
            .unwrap();
        again.wait(Some(LONG)).unwrap();
        scene.check();
    }
}

#[test]
fn streams_that_the_network_forgot_while_they_rested_are_replaced() {
    let scene = Scene::new("forgets", 2, Some(Way::Room(MOST)));
    scene.pull(LONG).wait(Some(LONG)).unwrap();
    let between = scene.between();
    assert!(between.open.load(Ordering::SeqCst) > 0, "some rest");
    *between.way.lock().unwrap() = Way::Forgets;
    scene.pull(LONG).wait(Some(LONG)).unwrap();
    scene.check();
}

#[test]
fn those_that_wait_have_no_threads_and_end_when_they_are_told_to() {
    const PULLS: usize = 200;
    let scene = Scene::new("waits", PULLS as u32, Some(Way::Stalls));
    let mut transfers: Vec<_> = (0..PULLS).map(|_| scene.pull(LONG)).collect();
    // Every stream that there may be is taken and brings nothing.
    while scene.between().open.load(Ordering::SeqCst) < MOST {
        std::thread::yield_now();
    }
    while transfers.iter().any(|transfer| transfer.state().as_str() == "claiming") {
        std::thread::yield_now();
    }
    let mut others = transfers.split_off(MOST);
    // Somebody looks after those that wait, and one thread may be on its way out.
    assert!(threads("pdkv-waits") <= MOST + 4, "{}", threads("pdkv-waits"));
    for transfer in others.drain(..10) {
        transfer.cancel();
        assert!(transfer.wait_quiesced(Some(LONG)), "it waits for the others' streams");
        assert_eq!(transfer.destination(), "invalid");
    }
    assert!(transfers.iter().any(|transfer| transfer.state().as_str() == "moving"));
    for transfer in transfers.iter().chain(&others) {
        transfer.cancel();
        assert!(transfer.wait_quiesced(Some(LONG)));
    }
    assert!(scene.between().open.load(Ordering::SeqCst) <= MOST);
    scene.consumer.close();
    scene.producer.close();
}
