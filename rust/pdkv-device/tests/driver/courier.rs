//! Cargo: by which route it goes, and that each is told its end once, whatever the driver says meanwhile.

use std::path::Path;
use std::sync::Arc;

use pdkv_core::ErrorKind;
use pdkv_core::plan::Plan;
use pdkv_core::span::Span;
use pdkv_device::cuda::{
    BulkSize, Cargo, Courier, DeviceBuffer, DeviceMapping, DeviceRegion, Driver, Event, Gpu, HostAccess, HostPath,
    HostPaths, Reach, Stream,
};
use pdkv_device::{HostRegion, HugePages};

use crate::alone::{Alone, loaded};
use crate::standin::{Eager, Held, asked_again, calls, counts, fail, reset, variant};

/// Pieces that continue one another on neither side.
const PIECES: u64 = 1024;
const PIECE: u64 = 512;
pub(crate) const LEN: u64 = 2 * PIECES * PIECE;
pub(crate) const NO_BULK: BulkSize = BulkSize::Never("a test");

/// Where memory of a test lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// On the GPU that copies.
    Here,
    /// On the GPU beside it.
    Beside,
    /// There too, but as another process would reach it.
    Mapped,
    Host,
}

pub(crate) struct Place {
    reach: Reach,
    region: Option<Arc<DeviceRegion>>,
}

impl Place {
    pub(crate) fn new(driver: &Driver, at: At, seed: u64) -> Self {
        let [gpu, next] = [0, 1].map(|ordinal| Gpu::open_on(driver, ordinal).unwrap());
        let allocate = |on: &Gpu| DeviceRegion::allocate(on, LEN).unwrap();
        let (reach, region) = match at {
            At::Here => {
                let region = allocate(&gpu);
                (Reach::Device(Arc::clone(&region)), Some(region))
            }
            At::Beside => {
                let region = allocate(&next);
                (Reach::Device(Arc::clone(&region)), Some(region))
            }
            At::Mapped => {
                let region = allocate(&next);
                gpu.reaches(&next).unwrap();
                let mapping = DeviceMapping::open(&gpu, LEN, &region.share().unwrap()).unwrap();
                (Reach::Mapping(mapping), Some(region))
            }
            At::Host => {
                let pool = HostRegion::allocate(LEN, HugePages::Never).unwrap();
                (Reach::Host(HostAccess::of(&gpu, &pool).unwrap()), None)
            }
        };
        let place = Self { reach, region };
        place.write(
            &(0..LEN)
                .map(|at| ((at * 31 + at / 251) ^ seed) as u8)
                .collect::<Vec<_>>(),
        );
        place
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        match (&self.region, &self.reach) {
            (Some(region), _) => region.write_at(0, bytes).unwrap(),
            (None, Reach::Host(access)) => access.region().write_at(0, bytes).unwrap(),
            _ => unreachable!(),
        }
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN as usize];
        match (&self.region, &self.reach) {
            (Some(region), _) => region.read_at(0, &mut bytes).unwrap(),
            (None, Reach::Host(access)) => access.region().read_at(0, &mut bytes).unwrap(),
            _ => unreachable!(),
        }
        bytes
    }
}

/// Every other piece, to where no two are neighbours.
fn spans() -> [Vec<Span>; 2] {
    let of = |step: u64| {
        let place = |number: u64| Span::new(0, (number * step % PIECES) * 2 * PIECE, PIECE);
        (0..PIECES).map(place).collect()
    };
    [of(5), of(7)]
}

/// Two places on the GPU that copies: what is to be copied, and where it goes.
pub(crate) fn side_by_side(driver: &Driver) -> (Place, Place) {
    (Place::new(driver, At::Here, 0), Place::new(driver, At::Here, 0x55))
}

pub(crate) fn cargo<T>(src: &Place, dst: &Place, owner: T) -> Cargo<T> {
    let [from, to] = spans();
    Cargo {
        plan: Plan::spans(&from, &[LEN], &to, &[LEN]).unwrap(),
        src: Arc::new(vec![src.reach.clone()]),
        dst: Arc::new(vec![dst.reach.clone()]),
        after: None,
        verify: false,
        owner,
    }
}

pub(crate) fn expected(src: &Place, dst: &Place) -> Vec<u8> {
    let (from, mut to) = (src.read(), dst.read());
    let [sources, targets] = spans();
    for (source, target) in sources.iter().zip(&targets) {
        to[target.offset as usize..][..PIECE as usize]
            .copy_from_slice(&from[source.offset as usize..][..PIECE as usize]);
    }
    to
}

/// Posts cargo and sees it land.
fn carry(courier: &mut Courier<()>, cargo: Cargo<()>) {
    courier.post(cargo).unwrap();
    while courier.is_busy() {
        for landed in courier.landed() {
            landed.outcome.unwrap();
        }
    }
}

/// How many blocks kernels were given, and how many batches were asked for, meanwhile.
pub(crate) fn asked(path: &Path, run: impl FnOnce()) -> (i64, i64) {
    let now = || {
        let counts = counts(path);
        ["blocks", "calls cuMemcpyBatchAsync"].map(|name| counts.get(name).copied().unwrap_or(0))
    };
    let before = now();
    run();
    let after = now();
    (after[0] - before[0], after[1] - before[1])
}

#[test]
fn cargo_goes_as_was_measured_and_takes_no_more_of_the_gpu_than_a_link_is_worth() {
    let Some(_alone) = Alone::begin() else {
        return;
    };
    // Large enough that the bounds show: all of it would be 192 blocks.
    let Some(path) = variant("wide", &["PDKV_STANDIN_MULTIPROCESSORS=32"]) else {
        return;
    };
    let driver = Driver::open_at(&path).unwrap();
    let gpu = loaded(&driver, 0);
    for way in [HostPath::Kernel, HostPath::Batch] {
        let mut courier = Courier::forced(&gpu, HostPaths::always(way), NO_BULK).unwrap();
        for (src, dst) in [
            (At::Here, At::Here),
            (At::Here, At::Beside),
            (At::Mapped, At::Here),
            (At::Host, At::Here),
            (At::Here, At::Host),
            (At::Host, At::Beside),
        ] {
            let (from, to) = (Place::new(&driver, src, 0), Place::new(&driver, dst, 0x55));
            let expected = expected(&from, &to);
            let found = asked(&path, || carry(&mut courier, cargo(&from, &to, ())));
            assert!(to.read() == expected, "{way:?}: {src:?} to {dst:?}");
            // 1024 pieces are work for 128 blocks.
            let wanted = match (src, dst) {
                (At::Here, At::Here) => (128, 0),
                (At::Host, At::Here) | (At::Here, At::Host) if way == HostPath::Batch => (0, 2),
                (At::Host, _) | (_, At::Host) => (16, 0),
                _ => (64, 0),
            };
            assert_eq!(found, wanted, "{way:?}: {src:?} to {dst:?}");
        }
    }
}

#[test]
fn a_batch_that_the_driver_takes_a_part_of_fails_when_that_part_is_over() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    let mut courier = Courier::forced(&gpu, HostPaths::always(HostPath::Batch), NO_BULK).unwrap();
    let (from, to) = (
        Place::new(&alone.driver, At::Host, 0),
        Place::new(&alone.driver, At::Here, 0x55),
    );
    fail(alone.path, c"cuMemcpyBatchAsync", 2, 1);
    courier.post(cargo(&from, &to, ())).unwrap();
    let mut landed = Vec::new();
    while courier.is_busy() {
        landed.extend(courier.landed());
    }
    let error = landed.pop().unwrap().outcome.unwrap_err();
    assert!(error.message().contains("`cuMemcpyBatchAsync` returned `1`"), "{error}");
    assert!(landed.is_empty() && !courier.is_broken());
    let expected = expected(&from, &to);
    carry(&mut courier, cargo(&from, &to, ()));
    assert!(to.read() == expected);
}

#[test]
fn a_gpu_that_dies_while_nothing_is_under_way_is_noticed_by_the_next_cargo() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    let (from, to) = side_by_side(&alone.driver);
    let others = Stream::new(gpu.context()).unwrap();
    let word = DeviceBuffer::new(gpu.context(), 8).unwrap();
    for waits in [false, true] {
        let mut courier = Courier::new(&gpu).unwrap();
        let event = Event::new(gpu.context()).unwrap();
        event.record(&others).unwrap();
        let after = waits.then(|| Arc::new(event));
        let cargo = |owner| Cargo {
            after: after.clone(),
            ..cargo(&from, &to, owner)
        };
        // Somebody else's kernel.
        fail(alone.path, c"run", 1, 719);
        word.fill(&others, 1).unwrap();
        others.synchronize().unwrap_err();
        assert!(courier.landed().is_empty() && !courier.is_broken());
        let mut ends = Vec::new();
        match courier.post(cargo(1)) {
            Ok(()) => ends.extend(
                courier
                    .landed()
                    .into_iter()
                    .map(|landed| (landed.owner, landed.outcome.unwrap_err())),
            ),
            Err(refused) => ends.push(refused),
        }
        let (owner, error) = ends.pop().unwrap();
        assert_eq!((owner, error.kind(), ends.len()), (1, ErrorKind::Device, 0));
        assert!(error.message().contains("returned `719`"), "{error}");
        assert!(courier.is_broken(), "else every later cargo would meet the same lane");
        assert!(courier.close().is_empty());
        reset(alone.path);
    }
}

#[test]
fn cargo_is_kept_however_long_the_driver_does_not_say_that_it_is_over() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    let mut courier = Courier::new(&gpu).unwrap();
    let (from, to) = side_by_side(&alone.driver);
    let expected = expected(&from, &to);
    let held = Held::new(alone.path);
    courier.post(cargo(&from, &to, 7)).unwrap();
    for call in [c"cuEventQuery", c"cuStreamQuery", c"cuStreamSynchronize"] {
        fail(alone.path, call, 0, 304);
    }
    asked_again(alone.path, 20, || {
        assert!(courier.landed().is_empty() && courier.is_busy() && !courier.is_broken());
    });
    reset(alone.path);
    assert!(courier.landed().is_empty(), "it is not over");
    drop(held);
    let mut landed = Vec::new();
    while landed.is_empty() {
        landed = courier.landed();
    }
    assert_eq!((landed.len(), landed[0].owner), (1, 7));
    landed.pop().unwrap().outcome.unwrap();
    assert!(to.read() == expected);
}

#[test]
fn cargo_that_nobody_wants_any_more_is_not_begun_when_there_is_room_again() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    let mut courier = Courier::new(&gpu).unwrap();
    let (from, to) = side_by_side(&alone.driver);
    let launches = || counts(alone.path)["launches"];
    let begun = launches();
    let held = Held::new(alone.path);
    // Until all streams have as many tables as they have room for, and some more.
    let mut posted = 0;
    let mut last = (begun, 0);
    while last.1 < 3 {
        courier.post(cargo(&from, &to, posted)).unwrap();
        posted += 1;
        let now = launches();
        last = if now == last.0 { (now, last.1 + 1) } else { (now, 0) };
    }
    let wanted = posted - 2;
    let over = courier.give_up(|&number| number == wanted || number < posted - 3);
    let mut ends: Vec<_> = over
        .into_iter()
        .map(|landed| (landed.owner, landed.outcome.unwrap_err().kind()))
        .collect();
    ends.sort_unstable_by_key(|(number, _)| *number);
    let kind = ErrorKind::TransferCancelled;
    assert_eq!(ends, [(posted - 3, kind), (posted - 1, kind)]);
    let full = launches();
    drop(held);
    let mut landed = 0;
    while courier.is_busy() {
        landed += courier
            .landed()
            .into_iter()
            .inspect(|landed| assert!(landed.outcome.is_ok()))
            .count();
    }
    assert_eq!(landed, posted - 2);
    assert_eq!(launches(), full + 1, "what was given up was begun");
}

#[test]
fn a_courier_that_closes_tells_every_end_once_however_long_the_driver_does_not_say() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    let mut courier = Courier::new(&gpu).unwrap();
    let pairs: Vec<_> = (0..10)
        .map(|number| {
            let at = |at, seed| Place::new(&alone.driver, at, seed);
            let from = at(if number % 2 == 0 { At::Here } else { At::Host }, number);
            (from, at(At::Here, 0x55))
        })
        .collect();
    let expected: Vec<_> = pairs.iter().map(|(from, to)| expected(from, to)).collect();
    for (number, (from, to)) in pairs.iter().enumerate() {
        courier.post(cargo(from, to, number)).unwrap();
    }
    // As while somebody captures a graph: the calls fail, and the copies go on.
    for _ in 0..3 {
        fail(alone.path, c"cuEventQuery", 1, 900);
        fail(alone.path, c"cuStreamSynchronize", 1, 900);
    }
    let mut ends: Vec<_> = courier
        .close()
        .into_iter()
        .map(|landed| landed.outcome.map(|()| landed.owner).unwrap())
        .collect();
    ends.sort_unstable();
    assert_eq!(ends, (0..pairs.len()).collect::<Vec<_>>());
    gpu.stream().synchronize().expect("all of the failures have come");
    for (number, ((_, to), expected)) in pairs.iter().zip(&expected).enumerate() {
        assert!(to.read() == *expected, "{number}");
    }
}

#[test]
fn cargo_that_lands_asks_the_driver_nothing() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    let asked = || {
        let calls = calls(alone.path);
        ["cuEventQuery", "cuStreamQuery", "cuStreamSynchronize"].map(|name| calls.get(name).copied().unwrap_or(0))
    };
    for way in [HostPath::Kernel, HostPath::Batch] {
        let mut courier = Courier::forced(&gpu, HostPaths::always(way), NO_BULK).unwrap();
        for (src, dst) in [(At::Here, At::Here), (At::Host, At::Here), (At::Here, At::Host)] {
            let (from, to) = (Place::new(&alone.driver, src, 0), Place::new(&alone.driver, dst, 0x55));
            let expected = expected(&from, &to);
            let eager = Eager::new(alone.path);
            let before = asked();
            // More than there are streams.
            for _ in 0..6 {
                courier.post(cargo(&from, &to, ())).unwrap();
            }
            let landed = courier.landed();
            assert!(landed.len() == 6 && landed.into_iter().all(|landed| landed.outcome.is_ok()));
            assert!(!courier.is_busy());
            assert_eq!(asked(), before, "{way:?}: {src:?} to {dst:?}");
            drop(eager);
            assert!(to.read() == expected, "{way:?}: {src:?} to {dst:?}");
        }
    }
}

#[test]
fn cargo_whose_flag_never_comes_and_cargo_in_a_context_that_dies_ends_all_the_same() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    let (from, to) = side_by_side(&alone.driver);
    let expected = expected(&from, &to);
    let mut courier = Courier::new(&gpu).unwrap();
    fail(alone.path, c"flag", 0, 1);
    for _ in 0..6 {
        carry(&mut courier, cargo(&from, &to, ()));
    }
    reset(alone.path);
    assert!(to.read() == expected);
    let mut courier = Courier::new(&gpu).unwrap();
    let held = Held::new(alone.path);
    for number in 0..6 {
        courier.post(cargo(&from, &to, number)).unwrap();
    }
    drop(held);
    fail(alone.path, c"run", 1, 719);
    let mut ends = Vec::new();
    while !courier.is_broken() {
        ends.extend(courier.landed());
    }
    ends.extend(courier.close());
    let mut owners: Vec<_> = ends
        .into_iter()
        .map(|landed| {
            assert_eq!(landed.outcome.unwrap_err().kind(), ErrorKind::Device);
            landed.owner
        })
        .collect();
    owners.sort_unstable();
    assert_eq!(owners, [0, 1, 2, 3, 4, 5]);
    reset(alone.path);
}
