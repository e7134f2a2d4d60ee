//! What of a peer is known, waited for, and not waited for again.

use super::*;
use pdkv_core::block_table::BlockTable;
use pdkv_core::dtype::DType;
use pdkv_core::layout::{LayerTensors, LayoutRequest, TensorFacts};
use pdkv_core::shard::Shard;
use std::ops::ControlFlow;
use std::sync::mpsc;

fn region(id: u64) -> Arc<RemoteRegion> {
    Arc::new(RemoteRegion::new(RegionId(id), 4096, 0, true, None))
}

const LONG: Duration = Duration::from_secs(60);

fn peer() -> Remote {
    Remote::new("peer".into(), Incarnation::new([1; 16]))
}

/// Puts a question by telling its number.
fn tells(told: &mpsc::Sender<u64>) -> impl FnOnce(u64) -> Result<()> + '_ {
    |number| {
        told.send(number).unwrap();
        Ok(())
    }
}

fn found(outcome: Result<Option<Arc<RemoteRegion>>>) -> Option<RegionId> {
    outcome.unwrap().map(|region| region.id)
}

#[test]
fn an_advert_that_is_late_is_waited_for() {
    let remote = peer();
    let (told, asked) = mpsc::channel();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| remote.region(RegionId(2), LONG, tells(&told)));
        asked.recv().unwrap();
        // News of something else meanwhile.
        assert!(remote.add_region(region(1)));
        assert!(remote.add_region(region(2)));
        assert_eq!(found(waits.join().unwrap()), Some(RegionId(2)));
    });
    let known = remote.region(RegionId(1), LONG, |_| panic!("what is known needs no question"));
    assert_eq!(found(known), Some(RegionId(1)));
}

#[test]
fn what_the_peer_has_not_advertised_before_its_answer_is_not_there() {
    let remote = peer();
    let answer = |number| {
        // Pings of a heartbeat, and an answer to a question that nobody has put yet.
        remote.answered(number & !QUESTION);
        remote.answered(number);
        remote.answered(number + 1);
        Ok(())
    };
    assert_eq!(found(remote.region(RegionId(1), LONG, answer)), None);
    let (told, asked) = mpsc::channel();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| remote.region(RegionId(1), LONG, tells(&told)));
        asked.recv().unwrap();
        assert!(remote.add_region(region(1)));
        assert_eq!(found(waits.join().unwrap()), Some(RegionId(1)));
    });
}

#[test]
fn an_id_is_refused_by_the_peers_word_alone_whoever_made_ids_up_before() {
    let remote = peer();
    let answer = |number| {
        remote.answered(number);
        Ok(())
    };
    let brief = |id, ask: &dyn Fn(u64) -> Result<()>| remote.region(RegionId(id), BRIEF_WAIT, ask);
    for made_up in 100..200 {
        remote.book().in_vain = InVain::default();
        assert_eq!(found(brief(made_up, &answer)), None);
    }
    let late = brief(9, &|number| {
        assert!(remote.add_region(region(9)));
        answer(number)
    });
    assert_eq!(found(late), Some(RegionId(9)));
    // The loop has waited for as long as it may: it is not said that nobody has the id.
    remote.book().in_vain = InVain {
        since: Some(Instant::now() + LONG),
        waited: BRIEF_WAIT,
    };
    let unasked = brief(10, &|_| panic!("asked again")).map(drop).unwrap_err();
    assert_eq!(unasked.kind(), ErrorKind::TransferTimeout);
    // What came by itself is known, and who can wait asks as ever.
    assert!(remote.add_region(region(10)));
    assert_eq!(found(brief(10, &|_| panic!("it is known"))), Some(RegionId(10)));
    assert_eq!(found(remote.region(RegionId(11), LONG, answer)), None);
}

#[test]
fn what_a_loop_waits_in_vain_is_bounded_for_each_spell() {
    let begin = Instant::now();
    let at = |milliseconds| begin + Duration::from_millis(milliseconds);
    let mut in_vain = InVain::default();
    assert_eq!(in_vain.left(begin), BRIEF_WAIT);
    in_vain.add(at(0), at(1));
    in_vain.add(at(5_000), at(5_100));
    assert_eq!(in_vain.left(at(9_000)), Duration::from_millis(399));
    in_vain.add(at(9_000), at(9_700));
    assert_eq!(in_vain.left(at(9_999)), Duration::ZERO);
    assert_eq!(in_vain.left(at(10_000)), BRIEF_WAIT);
    in_vain.add(at(10_500), at(10_600));
    assert_eq!(in_vain.left(at(20_499)), Duration::from_millis(400));
}

#[test]
fn whoever_would_ask_can_know_before() {
    let remote = peer();
    let settled = |id| remote.is_settled(CacheId(id));
    assert!(!settled(3), "it would be asked for");
    assert!(remote.add_region(region(4)));
    assert!(settled(3), "an id below those that were advertised was withdrawn");
    assert!(!settled(5));
    let lost = peer();
    lost.forget_all();
    assert!(lost.is_settled(CacheId(1)));
}

#[test]
fn a_peer_that_does_not_answer_is_an_error_and_costs_its_callers_one_long_wait() {
    let remote = peer();
    let ask = |wait| {
        remote
            .region(RegionId(1), wait, |_| Ok(()))
            .map(drop)
            .unwrap_err()
            .kind()
    };
    assert_eq!(ask(Duration::from_millis(1)), ErrorKind::TransferTimeout);
    // The next one would not end within the test's time.
    assert_eq!(ask(Duration::from_secs(1 << 30)), ErrorKind::TransferTimeout);
    let lost = || Error::new(ErrorKind::PeerLost, "test", "it is gone");
    let outcome = remote.region(RegionId(1), LONG, |_| Err(lost())).map(drop);
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::PeerLost);
}

#[test]
fn nothing_is_waited_for_or_entered_once_the_peer_is_lost() {
    let remote = peer();
    assert!(remote.add_region(region(7)));
    assert!(!remote.add_region(region(7)), "known already");
    let (told, asked) = mpsc::channel();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| remote.region(RegionId(8), LONG, tells(&told)));
        asked.recv().unwrap();
        assert_eq!(remote.forget_all().len(), 1);
        assert_eq!(found(waits.join().unwrap()), None);
    });
    assert!(!remote.add_region(region(9)));
    assert_eq!(found(remote.region(RegionId(9), LONG, |_| panic!("asked"))), None);
}

/// A cache of two layers in two regions, whose blocks lie `stride` bytes apart.
fn layout(stride: u64) -> Arc<KvLayout> {
    let tensors: Vec<_> = (0..2)
        .map(|layer| {
            LayerTensors::Joined(TensorFacts {
                name: format!("layers.{layer}"),
                address: 4096 + layer * (1 << 20),
                shape: vec![8, 1, 2, 8],
                strides_bytes: [stride, 16, 8, 1].map(u64::cast_signed).to_vec(),
                item_bytes: 1,
                dtype: DType::U8,
            })
        })
        .collect();
    let resolved = LayoutRequest::parse("BHNC", 2).unwrap().resolve(&tensors).unwrap();
    Arc::new(resolved.layout)
}

fn advertise(remote: &Remote) -> Arc<RemoteCache> {
    assert!(remote.add_region(region(1)) && remote.add_region(region(2)));
    remote.add_cache(CacheAdvert {
        id: CacheId(3),
        layout: (*layout(16)).clone(),
        regions: vec![RegionId(1), RegionId(2)],
        shard: Shard::whole(2, 1),
        fingerprint: [0; 32],
        model: String::new(),
    });
    remote
        .cache(CacheId(3), LONG, |_| panic!("it is known"))
        .unwrap()
        .unwrap()
}

#[test]
fn the_regions_of_a_cache_are_looked_up_once_and_go_with_their_withdrawal() {
    for gone in [RegionId(1), RegionId(2)] {
        let remote = peer();
        let cache = advertise(&remote);
        let known = remote.cache_regions(&cache).unwrap();
        assert!(Arc::ptr_eq(&known, &remote.cache_regions(&cache).unwrap()));
        drop(known);
        // The cache is still there, which no honest owner does, and keeps nothing of what was withdrawn.
        let mut withdrawn = remote.withdraw(&[gone], &[]);
        assert_eq!(Arc::strong_count(&withdrawn.pop().unwrap()), 1);
        let error = remote.cache_regions(&cache).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Region);
    }
    for withdraw in [
        |remote: &Remote| remote.withdraw(&[RegionId(1), RegionId(2)], &[CacheId(3)]),
        Remote::forget_all,
    ] {
        let remote = peer();
        let cache = advertise(&remote);
        drop(remote.cache_regions(&cache).unwrap());
        let regions = withdraw(&remote);
        assert!(regions.iter().all(|region| Arc::strong_count(region) == 1));
        assert!(remote.cache_regions(&cache).is_err());
    }
    // A cache that goes before its regions does not keep them, looked up before or after.
    let remote = peer();
    let cache = advertise(&remote);
    drop(remote.cache_regions(&cache).unwrap());
    assert!(remote.withdraw(&[], &[CacheId(3)]).is_empty());
    drop(remote.cache_regions(&cache).unwrap());
    let regions = remote.withdraw(&[RegionId(1), RegionId(2)], &[]);
    assert!(regions.iter().all(|region| Arc::strong_count(region) == 1));
}

#[test]
fn a_pairing_is_of_this_cache_this_way_and_these_layers() {
    let remote = peer();
    let cache = advertise(&remote);
    let (all, one) = (Selection::layers(0, 2), Selection::layers(1, 1));
    let blocks = BlockTable::from_ids(&[2]);
    // Where the second layer's or the only layer's block is read and written.
    let last = |ours: &Arc<KvLayout>, direction, selection: &Selection| {
        let pairing = cache.pairing(ours, direction, selection).unwrap();
        let plan = pairing.plan(&blocks, &blocks).unwrap();
        let mut found = None;
        let _ = plan.walk(0..plan.unit_count(), |run| {
            found = Some((run.src.offset, run.dst.offset));
            ControlFlow::Continue(())
        });
        (found.unwrap(), plan.total_bytes())
    };
    let (near, wide) = (layout(16), layout(32));
    // Twice: made, and remembered; in between by others, which are remembered or not.
    for _ in 0..2 {
        assert_eq!(last(&near, Direction::Read, &all), ((32, 32), 32));
        assert_eq!(last(&wide, Direction::Read, &all), ((32, 64), 32));
        assert_eq!(last(&wide, Direction::Write, &all), ((64, 32), 32));
        assert_eq!(last(&wide, Direction::Read, &one), ((32, 64), 16));
        assert_eq!(last(&wide, Direction::Read, &all), ((32, 64), 32));
    }
}
