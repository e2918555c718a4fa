mod rows;
fn main() {
    let seeds: Vec<u64> = (1..=24).collect();
    let t = std::time::Instant::now();
    let print = |rows: Vec<rows::Row>| {
        for row in rows {
            println!("{} {:.3} {} {}", row.name, row.value, row.unit, row.holds());
        }
    };
    if std::env::var("WD").is_err() {
        let seeds: Vec<u64> = (1..=12).collect();
        print(rows::salus::rows(&seeds));
        eprintln!("{:?}", t.elapsed());
        print(rows::carbyne::rows(&seeds));
        eprintln!("{:?}", t.elapsed());
        print(rows::fairness::rows(&seeds));
        eprintln!("{:?}", t.elapsed());
    } else {
        print(rows::karuna::rows(
            &seeds,
            std::env::var("N").unwrap().parse().unwrap(),
        ));
        eprintln!("{:?}", t.elapsed());
    }
}
